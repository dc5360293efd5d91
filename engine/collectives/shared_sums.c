/* Collective operations of ranks on one machine through memory that all of them have mapped, called through ctypes
 * (engine/collectives/shared_memory.py).
 *
 *     counters [ranks]            turns that a rank has written, and whether it sleeps
 *     slots [ranks][2][TILE]      what it has written: even tiles, odd tiles
 *
 * Tensors are worked off in tiles. A tile of a sum takes one turn of two ranks, two turns of more:
 *
 *     two ranks      write own tile ┊ add up both in order of rank
 *     more           write own tile ┊ add up own slice of all, in order of rank, into own slot ┊ copy the others' slices
 *
 * ┊ is where a rank announces its turn and waits until all have. It announces no turn of a tile before it is done with
 * the tile before, and writes no tile before all have announced the last turn of the tile before: two slots are enough.
 *
 * A rank that waits spins for a short time, then sleeps in poll() on its sockets to those that it waits for. These send
 * a byte to a rank that sleeps; the kernel closes the sockets of a process that ends, however it ends. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

#define TILE (int64_t)(256 << 10) /* bytes: those of all ranks stay in an L2 cache */
#define BLOCK (int64_t)1024       /* elements that are added up at a time; their sums stay in the L1 cache */
#define PARALLEL (int64_t)16      /* blocks from which on threads share the work */
#define MOST_RANKS 64
#define PAUSES 64 /* between two looks at the clock */

enum { FLOAT32, BFLOAT16, INT64 };
enum { DONE, GONE, LATE, DIFFERENT }; /* results; all but DONE times MOST_RANKS, plus the rank that is meant */

struct counter {
    _Atomic uint64_t written; /* turns */
    _Atomic uint32_t asleep;
    uint64_t bytes[2]; /* of the tiles of the last two turns, to find ranks that are not in the same operation */
} __attribute__((aligned(128))); /* a pair of cache lines, which some processors fetch together */

struct group {
    char *memory;
    const int32_t *sockets; /* to each rank; not used for the own one */
    int64_t size, rank;
    int64_t turn, tile; /* that come next */
    int64_t spin_ns, timeout_ns;
};

/* Bytes of memory that a group needs; the memory is zero at first. */
int64_t headrace_shared_bytes(int64_t size) { return size * ((int64_t)sizeof(struct counter) + 2 * TILE); }

static struct counter *counter_of(const struct group *g, int64_t rank) { return (struct counter *)g->memory + rank; }

/* Of the tile at hand. */
static char *slot_of(const struct group *g, int64_t rank)
{
    return g->memory + g->size * (int64_t)sizeof(struct counter) + (2 * rank + (g->tile & 1)) * TILE;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int has_written(const struct group *g, int64_t rank, int64_t turn)
{
    return rank == g->rank || (int64_t)atomic_load(&counter_of(g, rank)->written) > turn;
}

/* The first rank that has not written a turn; size if all have. */
static int64_t missing(const struct group *g, int64_t turn)
{
    int64_t rank = 0;
    while (rank < g->size && has_written(g, rank, turn))
        rank++;
    return rank;
}

/* Sleep until a missing rank sends a byte, ends, or the time is over. */
static int64_t sleep_once(const struct group *g, int64_t turn, int64_t left_ns)
{
    struct pollfd sockets[MOST_RANKS];
    int64_t ranks[MOST_RANKS], count = 0;
    for (int64_t rank = 0; rank < g->size; rank++)
        if (!has_written(g, rank, turn)) {
            sockets[count] = (struct pollfd){.fd = g->sockets[rank], .events = POLLIN};
            ranks[count++] = rank;
        }
    const int64_t left_ms = left_ns / 1000000 + 1;
    if (!count || poll(sockets, count, left_ms < INT32_MAX ? (int)left_ms : INT32_MAX) <= 0)
        return DONE;
    for (int64_t i = 0; i < count; i++) {
        char bytes[64]; /* how many there are says nothing: some may be for turns before */
        if (!sockets[i].revents)
            continue;
        ssize_t got = recv(sockets[i].fd, bytes, sizeof(bytes), MSG_DONTWAIT);
        int ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
        if (ended && !has_written(g, ranks[i], turn))
            return GONE * MOST_RANKS + ranks[i];
    }
    return DONE;
}

/* Wait until all ranks have written a turn. */
static int64_t wait_for(const struct group *g, int64_t turn)
{
    if (missing(g, turn) == g->size)
        return DONE;
    const int64_t started = now_ns();
    do {
        for (int i = 0; i < PAUSES; i++) {
            if (missing(g, turn) == g->size)
                return DONE;
            PAUSE();
        }
    } while (now_ns() - started < g->spin_ns);
    int64_t found = DONE, rank;
    atomic_store(&counter_of(g, g->rank)->asleep, 1); /* before it looks again; announce() does it the other way round */
    while (found == DONE && (rank = missing(g, turn)) < g->size) {
        const int64_t left = g->timeout_ns - (now_ns() - started);
        found = left <= 0 ? LATE * MOST_RANKS + rank : sleep_once(g, turn, left);
    }
    atomic_store(&counter_of(g, g->rank)->asleep, 0);
    return found;
}

/* Let the others know that this turn is written. bytes: of the tile. */
static void announce(struct group *g, int64_t bytes)
{
    struct counter *own = counter_of(g, g->rank);
    own->bytes[g->turn & 1] = bytes;
    atomic_store(&own->written, g->turn + 1);
    for (int64_t rank = 0; rank < g->size; rank++)
        if (rank != g->rank && atomic_load(&counter_of(g, rank)->asleep)) /* a full socket wakes it as well */
            (void)!send(g->sockets[rank], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    g->turn++;
}

/* Announce, and wait until all have written the same turn. */
static int64_t meet(struct group *g, int64_t bytes)
{
    announce(g, bytes);
    const int64_t turn = g->turn - 1, found = wait_for(g, turn);
    for (int64_t rank = 0; found == DONE && rank < g->size; rank++)
        if (counter_of(g, rank)->bytes[turn & 1] != (uint64_t)bytes)
            return DIFFERENT * MOST_RANKS + rank;
    return found;
}

static void copy(char *to, const char *from, int64_t bytes)
{
    const int64_t step = BLOCK * 4;
#pragma omp parallel for schedule(static) if (bytes >= PARALLEL * step)
    for (int64_t at = 0; at < bytes; at += step)
        memcpy(to + at, from + at, bytes - at < step ? bytes - at : step);
}

static float widened(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To the nearest, to even where two are; NaN as torch has it. */
static uint16_t rounded(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* to[0 .. n) = the sum over all ranks, in order of rank. from: offset in the slots, in elements. */
#define ADD_BLOCK(type, sum, widen, narrow)                              \
    do {                                                                 \
        sum sums[BLOCK];                                                 \
        for (int64_t rank = 0; rank < g->size; rank++) {                 \
            const type *part = (const type *)slot_of(g, rank) + from; \
            if (rank == 0)                                               \
                for (int64_t i = 0; i < n; i++)                          \
                    sums[i] = widen(part[i]);                            \
            else                                                         \
                for (int64_t i = 0; i < n; i++)                          \
                    sums[i] += widen(part[i]);                           \
        }                                                                \
        for (int64_t i = 0; i < n; i++)                                  \
            ((type *)to)[i] = narrow(sums[i]);                           \
    } while (0)
#define SAME(value) (value)

static void add_block(const struct group *g, void *to, int64_t from, int64_t n, int64_t dtype)
{
    if (dtype == FLOAT32)
        ADD_BLOCK(float, float, SAME, SAME);
    else if (dtype == BFLOAT16)
        ADD_BLOCK(uint16_t, float, widened, rounded);
    else
        ADD_BLOCK(uint64_t, uint64_t, SAME, SAME);
}

static int64_t item_bytes(int64_t dtype) { return dtype == FLOAT32 ? 4 : dtype == BFLOAT16 ? 2 : 8; }

/* to [count] = elements [first, first + count) of the sum of the tile at hand. */
static void add(const struct group *g, char *to, int64_t first, int64_t count, int64_t dtype)
{
    const int64_t item = item_bytes(dtype);
#pragma omp parallel for schedule(static) if (count >= PARALLEL * BLOCK)
    for (int64_t at = 0; at < count; at += BLOCK)
        add_block(g, to + at * item, first + at, count - at < BLOCK ? count - at : BLOCK, dtype);
}

/* Where a rank's slice of a tile begins, in elements: whole cache lines, so that no two ranks write to one. */
static int64_t slice_start(const struct group *g, int64_t rank, int64_t count, int64_t item)
{
    const int64_t line = 64 / item, lines = (count + line - 1) / line, start = lines * rank / g->size * line;
    return start < count ? start : count;
}

static int64_t sum_tile(struct group *g, char *x, int64_t count, int64_t dtype)
{
    const int64_t item = item_bytes(dtype);
    char *own = slot_of(g, g->rank);
    copy(own, x, count * item);
    int64_t found = meet(g, count * item);
    if (found != DONE)
        return found;
    if (g->size == 2) {
        add(g, x, 0, count, dtype);
        return DONE;
    }
    const int64_t first = slice_start(g, g->rank, count, item), last = slice_start(g, g->rank + 1, count, item);
    add(g, own + first * item, first, last - first, dtype); /* the others do not read this slice before the next turn */
    found = meet(g, count * item);
    for (int64_t rank = 0; found == DONE && rank < g->size; rank++) {
        const int64_t start = slice_start(g, rank, count, item) * item, end = slice_start(g, rank + 1, count, item) * item;
        copy(x + start, slot_of(g, rank) + start, end - start);
    }
    return found;
}

/* x [count] = the sum of all ranks' x, with equal bits on all of them. Returns a result as above. */
int64_t headrace_shared_sum(struct group *g, char *x, int64_t count, int64_t dtype)
{
    const int64_t item = item_bytes(dtype), most = TILE / item;
    for (int64_t at = 0; at < count; at += most, g->tile++) {
        int64_t found = wait_for(g, g->turn - 1);
        if (found == DONE)
            found = sum_tile(g, x + at * item, count - at < most ? count - at : most, dtype);
        if (found != DONE)
            return found;
    }
    return DONE;
}

/* The bytes of all ranks, or of one of them, at all that want them. own: what this rank gives, NULL for nothing. to: for
 * what it gets, NULL for nothing; [ranks][bytes] from all, [bytes] from one. source: the one, or -1 for all. Returns a
 * result as above. */
int64_t headrace_shared_gather(struct group *g, const char *own, char *to, int64_t bytes, int64_t source)
{
    for (int64_t at = 0; at < bytes; at += TILE, g->tile++) {
        const int64_t now = bytes - at < TILE ? bytes - at : TILE;
        int64_t found = wait_for(g, g->turn - 1);
        if (found == DONE && own)
            copy(slot_of(g, g->rank), own + at, now);
        if (found == DONE && to)
            found = meet(g, now);
        else if (found == DONE)
            announce(g, now); /* the others read it while this rank goes on */
        if (found != DONE)
            return found;
        for (int64_t rank = 0; to && rank < g->size; rank++)
            if (source < 0 || rank == source)
                copy(to + (source < 0 ? rank * bytes : 0) + at, slot_of(g, rank), now);
    }
    return DONE;
}
