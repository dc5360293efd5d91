/* Runs a forward pass as a graph of tasks, without a barrier between kernels; or, if it has few rows, step by step.
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
 * A tile's state is one number, which threads change by a compare-and-swap: nobody waits for a thread that has a lock.
 *
 * Rows that are too few for tiles, such as those of requests that decode, are one tile. Threads divide each of its steps,
 * a product by its columns say, into items, which they take one after the other: one that is held up keeps one item. */

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "graph.h"

#define WHOLE 16  /* rows of a tile but the last are multiples of it where they are many: full vectors of queries */
#define SPINS 200 /* looks at all tiles before a thread sleeps; some 20 µs */
#define LOOKS 2000 /* at whether a step is done, before a thread sleeps; as long */

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

/* A pass whose steps threads divide. */
struct division {
    const struct tasks *tasks;
    const struct stack *stack;
    const struct batch *batch;
    char *shared;
    int64_t steps;                                        /* of all layers */
    int64_t items[MOST_STEPS];                            /* of each step of a layer */
    _Atomic uint64_t taken __attribute__((aligned(64))); /* the step under way << 32 | items of it that were taken */
    _Atomic int64_t left;                                 /* items of it that are not done */
    _Atomic uint32_t step, sleepers;                      /* the step under way, modulo 2^32 */
};

static int64_t items_of(const struct division *whole, int64_t step)
{
    return whole->items[step % whole->tasks->steps];
}

/* Begins the first of the steps from `step` on that has items; none is left of a pass that was cancelled. */
static void begin_step(struct division *whole, int64_t step)
{
    int64_t items = 0;
    if (*(_Atomic int64_t *)&whole->batch->progress[1])
        step = whole->steps;
    for (; step < whole->steps && !(items = items_of(whole, step)); step++)
        ;
    if (step < whole->steps && step % whole->tasks->steps == 0)
        ++*whole->batch->progress;
    atomic_store(&whole->left, items);
    atomic_store(&whole->taken, (uint64_t)step << 32);
    atomic_store(&whole->step, (uint32_t)step);
    if (atomic_load(&whole->sleepers))
        syscall(SYS_futex, &whole->step, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Waits until the step under way is another one than `step`. */
static void wait_for_step(struct division *whole, int64_t step)
{
    for (int looks = 0; looks < LOOKS; looks++) {
        if ((int64_t)(atomic_load_explicit(&whole->taken, memory_order_relaxed) >> 32) != step)
            return;
        pause_briefly();
    }
    atomic_fetch_add(&whole->sleepers, 1);
    syscall(SYS_futex, &whole->step, FUTEX_WAIT_PRIVATE, (uint32_t)step, NULL, NULL, 0);
    atomic_fetch_sub(&whole->sleepers, 1);
}

/* What each thread does: items of the step under way, until no step is left. */
static void work_on_steps(struct division *whole, int thread, char *memory)
{
    const int64_t of_layer = whole->tasks->steps;
    uint64_t random = 0x9e3779b97f4a7c15u * (uint64_t)(whole->batch->seed + thread + 1);
    for (;;) {
        uint64_t taken = atomic_load(&whole->taken);
        const int64_t step = (int64_t)(taken >> 32), item = (int64_t)(taken & UINT32_MAX);
        if (step == whole->steps)
            return;
        if (item == items_of(whole, step)) {
            wait_for_step(whole, step);
            continue;
        }
        if (!atomic_compare_exchange_strong(&whole->taken, &taken, taken + 1))
            continue;
        if (whole->batch->seed)
            hold_up(&random);
        whole->tasks->run_item(whole->stack, whole->batch, step / of_layer, step % of_layer, item, whole->shared, memory);
        if (atomic_fetch_sub(&whole->left, 1) == 1)
            begin_step(whole, step + 1);
    }
}

static int run_divided(const struct tasks *tasks, const struct stack *stack, const struct batch *batch)
{
    struct division whole = {tasks, stack, batch, .steps = tasks->steps * stack->count};
    int64_t bytes = tasks->bytes(stack, batch);
    char *memory = new_scratch(&bytes, tasks->shared_bytes(stack, batch));
    if (!memory)
        return -1;
    whole.shared = memory + bytes * omp_get_max_threads();
    for (int64_t step = 0; step < tasks->steps; step++)
        whole.items[step] = tasks->items(stack, batch, step);
    begin_step(&whole, 0);
#pragma omp parallel
    work_on_steps(&whole, omp_get_thread_num(), memory + omp_get_thread_num() * bytes);
    free(memory);
    return 0;
}

static int run_tiles(const struct tasks *tasks, const struct stack *stack, const struct batch *batch)
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

int headrace_run_graph(const struct tasks *tasks, const struct stack *stack, const struct batch *batch)
{
    return batch->tile_rows ? run_tiles(tasks, stack, batch) : run_divided(tasks, stack, batch);
}
