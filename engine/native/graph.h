/* A forward pass over layers as a graph of tasks, which graph.c runs, and layer_tasks.h and layer_steps.h compute; the
 * records that kernel_calls.py mirrors. Addresses are of dense memory, in the dtype of the computation unless they say otherwise. */

#ifndef HEADRACE_GRAPH_H
#define HEADRACE_GRAPH_H

#include "attention.h"

/* Weights of a layer. Matrices are packed, [columns / LANES, depth, LANES] or as multiply_bfloat16.h says, or struct
 * int8_matrix, beside biases in float32. NULL: has none. */
struct layer {
    const void *input_norm;           /* [hidden] */
    const void *qkv, *qkv_bias;       /* [(heads + 2 * kv_heads) * width, hidden] */
    const void *q_norm, *k_norm;      /* [width] */
    const void *output, *output_bias; /* [hidden, heads * width] */
    const void *post_norm;            /* [hidden] */
    const void *gate_up, *down;       /* [2 * inner, hidden], [hidden, inner] */
};

/* The layers of a stage. */
struct stack {
    const struct layer *layers;
    int64_t count, hidden, inner;
    int64_t int8; /* whether matrices are in 8 bits */
    float eps;
};

/* What a pass computes. */
struct batch {
    const struct pass *pass; /* its items are used where tile_rows is 0 */
    const struct scoring *scoring;
    int64_t rows;
    void *hidden;            /* [rows, hidden]: the residual stream, in place */
    void *joined;            /* [rows, (heads + 2 * kv_heads) * width]: working memory */
    const float *cos, *sin;  /* [rows, width], see rotate() */
    int64_t tile_rows;       /* of a task, at most; 0: all rows are one tile, and threads divide each of its steps */
    int64_t *progress;       /* counts layers that were begun, and whether the pass was cancelled meanwhile */
    int64_t seed;            /* 0, or tasks are taken at random, and held up: for tests */
};

/* Consecutive rows of a batch. */
struct rows_of_task {
    int64_t row, count;
    int64_t span; /* of the first row */
};

#define MOST_STEPS 16

/* The two halves of a layer, over a tile of rows, which know no other tile. Between them, keys and values of all earlier
 * rows of its requests have to be in the pool. */
struct tasks {
    /* Bytes of working memory of one thread. */
    int64_t (*bytes)(const struct stack *stack, const struct batch *batch);
    /* Norm, queries, keys and values, which go to the pool. */
    void (*project)(const struct stack *stack, const struct batch *batch, struct rows_of_task rows, int64_t layer,
                    char *memory);
    /* Attention and MLP. */
    void (*finish)(const struct stack *stack, const struct batch *batch, struct rows_of_task rows, int64_t layer,
                   char *memory);

    /* The same, as steps over all rows: what each does needs all of the step before it. */
    int64_t steps; /* of a layer, MOST_STEPS at most */
    /* Items of a step, which are independent of each other; the first step has some. */
    int64_t (*items)(const struct stack *stack, const struct batch *batch, int64_t step);
    /* Bytes of working memory that all threads share, beside that of each. */
    int64_t (*shared_bytes)(const struct stack *stack, const struct batch *batch);
    void (*run_item)(const struct stack *stack, const struct batch *batch, int64_t layer, int64_t step, int64_t item,
                     char *shared, char *memory);
};

/* Runs all tasks of a pass on OpenMP's threads. Returns -1 when memory ran out, else 0. */
int headrace_run_graph(const struct tasks *tasks, const struct stack *stack, const struct batch *batch);

#endif
