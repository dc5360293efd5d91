/* Runs a forward pass as a graph of tasks, without a barrier between kernels.
 *
 * A tile of rows goes through the layers by itself, but for attention, which needs the keys and values of earlier rows of
 * the same request:
 *
 *     round           0           1                     2                                 layers
 *     tile 0    project 0 │ finish 0, project 1 │ finish 1, project 2 │  ...  │ finish layers - 1
 *     tile 1    project 0 │ finish 0, project 1 │ ...
 *
 * Round k of a tile may begin when those before it with rows of its first request are done with round k - 1. A free
 * thread takes the tile that may begin and is furthest behind, so that threads read the weights of a layer at about the
 * same time. One that is held up by other processes holds up its tile, and later the tiles behind it. What is computed
 * for a row depends neither on threads nor on their order.
 *
 * A tile's state is one number, which threads change by a compare-and-swap: nobody waits for a thread that has a lock. */

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "graph.h"

#define WHOLE 16  /* rows of a tile but the last are multiples of it where they are many: full vectors of queries */
#define SPINS 200 /* looks at all tiles before a thread sleeps; some 20 µs */

struct tile {
    struct rows_of_task rows;
    int64_t needs;               /* the first tile with rows of its first request */
    _Atomic int64_t state;       /* 2 * rounds that are done, + 1 while a thread has it */
} __attribute__((aligned(64)));

struct run {
    const struct tasks *tasks;
    const struct stack *stack;
    const struct batch *batch;
    struct tile *tiles;
    int64_t count;
    _Atomic uint32_t rounds __attribute__((aligned(64))); /* that are done, of all tiles, modulo 2^32 */
    _Atomic uint32_t sleepers;
};

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* A sequence of pseudorandom numbers (xorshift). */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

/* Up to a millisecond, once in four times. */
static void hold_up(uint64_t *random)
{
    const uint64_t drawn = next_random(random);
    if (drawn % 4 == 0)
        nanosleep(&(struct timespec){.tv_nsec = drawn / 4 % 1000000}, NULL);
}

/* A tile that may begin its next round, as *state says, which is furthest behind; NULL if none may. random: not NULL for
 * any of them. *left: whether any tile is not done. */
static struct tile *find_tile(struct run *run, int64_t *state, int *left, uint64_t *random)
{
    const int64_t rounds = run->stack->count + 1;
    struct tile *found = NULL;
    int64_t before = INT64_MAX, last = INT64_MAX, choices = 0; /* rounds done by all tiles that one needs; by the last */
    *left = 0;
    for (int64_t t = 0; t < run->count; t++) {
        struct tile *tile = &run->tiles[t];
        if (tile->needs == t)
            before = INT64_MAX;
        else if (tile->needs == t - 1 || last < before)
            before = last;
        const int64_t now = atomic_load_explicit(&tile->state, memory_order_acquire), done = now / 2;
        last = done;
        *left |= done < rounds;
        if (now % 2 || done == rounds || before < done)
            continue;
        if (random ? next_random(random) % (uint64_t)++choices == 0 : !found || done < *state / 2) {
            found = tile;
            *state = now;
        }
    }
    return found;
}

static int cancelled(const struct run *run)
{
    return atomic_load_explicit((_Atomic int64_t *)&run->batch->progress[1], memory_order_relaxed) != 0;
}

static void run_round(const struct run *run, const struct tile *tile, int64_t round, char *memory)
{
    if (round > 0)
        run->tasks->finish(run->stack, run->batch, tile->rows, round - 1, memory);
    if (cancelled(run))
        return;
    if (round < run->stack->count)
        run->tasks->project(run->stack, run->batch, tile->rows, round, memory);
}

/* Waits until another round than the `seen` is done. */
static void sleep_until_done(struct run *run, uint32_t seen)
{
    atomic_fetch_add(&run->sleepers, 1);
    syscall(SYS_futex, &run->rounds, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&run->sleepers, 1);
}

/* What each thread does: rounds of tiles until all are done, or nobody needs them any more. A thread that sleeps then is
 * woken by the end of a round, which another one is in. */
static void work(struct run *run, int thread, char *memory)
{
    uint64_t seed = 0x9e3779b97f4a7c15u * (uint64_t)(run->batch->seed + thread + 1), *random = NULL;
    if (run->batch->seed)
        random = &seed;
    for (int turns = 0, left = 1;; turns++) {
        const uint32_t seen = atomic_load(&run->rounds);
        int64_t state = 0;
        struct tile *tile = find_tile(run, &state, &left, random);
        if (!left || cancelled(run))
            return;
        if (!tile) {
            if (turns < SPINS)
                pause_briefly();
            else
                sleep_until_done(run, seen);
            continue;
        }
        if (!atomic_compare_exchange_strong_explicit(&tile->state, &state, state + 1, memory_order_acquire,
                                                     memory_order_relaxed))
            continue;
        if (random)
            hold_up(random);
        if (tile == run->tiles && state / 2 < run->stack->count)
            ++*run->batch->progress;
        run_round(run, tile, state / 2, memory);
        if (random)
            hold_up(random);
        atomic_store_explicit(&tile->state, state + 2, memory_order_release);
        atomic_fetch_add(&run->rounds, 1);
        if (atomic_load(&run->sleepers))
            syscall(SYS_futex, &run->rounds, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        turns = 0;
    }
}

/* The first row of a tile: tiles have almost equal numbers of rows. */
static int64_t first_row(const struct run *run, int64_t tile)
{
    const int64_t row = run->batch->rows * tile / run->count, whole = run->batch->tile_rows % WHOLE ? 1 : WHOLE;
    return tile < run->count ? (row + whole - 1) / whole * whole : row;
}

/* Cuts a batch into tiles. */
static void cut_tiles(struct run *run)
{
    const struct batch *batch = run->batch;
    const struct span *spans = batch->pass->spans;
    for (int64_t t = 0, span = 0; t < run->count; t++) {
        struct tile *tile = &run->tiles[t];
        tile->rows.row = first_row(run, t);
        tile->rows.count = first_row(run, t + 1) - tile->rows.row;
        while (spans[span].row + spans[span].count <= tile->rows.row)
            span++;
        tile->rows.span = span;
        tile->needs = t;
        while (tile->needs > 0 && run->tiles[tile->needs].rows.row > spans[span].row)
            tile->needs--;
        atomic_init(&tile->state, 0);
    }
}

int headrace_run_graph(const struct tasks *tasks, const struct stack *stack, const struct batch *batch)
{
    struct run run = {tasks, stack, batch, .count = (batch->rows + batch->tile_rows - 1) / batch->tile_rows};
    int64_t bytes = tasks->bytes(stack, batch);
    char *memory = new_scratch(&bytes, 0);
    run.tiles = aligned_alloc(64, run.count * sizeof(struct tile));
    const int failed = !memory || !run.tiles;
    if (!failed) {
        cut_tiles(&run);
#pragma omp parallel
        work(&run, omp_get_thread_num(), memory + omp_get_thread_num() * bytes);
    }
    free(run.tiles);
    free(memory);
    return failed ? -1 : 0;
}
