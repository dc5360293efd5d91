/* The tasks of a layer over a tile of rows (graph.h), each on one thread: dense layers with grouped-query attention, in
 * float32, and in bfloat16 where LANES is 32, by weights of the same dtype or in 8 bits. Rounded where the kernels of
 * elementwise.h, multiply_tile.h and int8.h round. */

#include "attention_float32.h"
#include "graph.h"
#include "multiply_tile.h"
#include "rows.h"

/* Elements between rows of working memory: whole cache lines, an odd number of them, since rows that are multiples of 4
 * KiB apart would share few places of the L1 cache. */
static int64_t stride_of(int64_t width, int dtype)
{
    const int64_t line = 64 / item_bytes(dtype), lines = (width + line - 1) / line;
    return (lines | 1) * line;
}

/* Bytes of so many rows. */
static int64_t bytes_of(int64_t rows, int64_t width, int dtype)
{
    return rows * stride_of(width, dtype) * item_bytes(dtype);
}

/* Bytes of the rows of any product, quantised; 0 if weights are not in 8 bits. */
static int64_t quantized_bytes(const struct stack *stack, int64_t rows)
{
    int64_t most = 0;
    for (int64_t layer = 0; stack->int8 && layer < stack->count; layer++) {
        const struct layer *weights = &stack->layers[layer];
        const void *const matrices[] = {weights->qkv, weights->output, weights->gate_up, weights->down};
        for (int i = 0; i < 4; i++) {
            const int64_t bytes = int8_bytes(matrices[i], rows);
            most = bytes > most ? bytes : most;
        }
    }
    return most;
}

INLINE int64_t task_bytes(const int dtype, const struct stack *stack, const struct batch *batch)
{
    const struct pass *pass = batch->pass;
    const int64_t rows = batch->tile_rows, heads = pass->kv_heads * pass->group;
    const int64_t quantized = quantized_bytes(stack, rows);
    int64_t attend = attend_bytes(pass, rows);
#if HAS_BFLOAT16
    if (dtype == BFLOAT16)
        attend = headrace_attend_bytes_bfloat16(pass, rows);
#endif
    return BLOCKS(rows) * sizeof(float) + bytes_of(rows, stack->hidden, dtype) + bytes_of(rows, stack->inner, dtype) +
           bytes_of(rows, heads * pass->keys.width, dtype) + (attend > quantized ? attend : quantized);
}

/* Working memory of a thread, of `rows` rows. */
struct own {
    void *blocks;  /* [BLOCKS(rows)] */
    char *normed, *inner, *attended;
    char *other; /* working memory of attention, or the rows of a product, quantised */
};

INLINE struct own own_at(const int dtype, const struct stack *stack, const struct batch *batch, char *memory)
{
    const int64_t rows = batch->tile_rows, attended = batch->pass->kv_heads * batch->pass->group * batch->pass->keys.width;
    struct own own = {.blocks = memory};
    own.normed = memory + BLOCKS(rows) * sizeof(float);
    own.inner = own.normed + bytes_of(rows, stack->hidden, dtype);
    own.attended = own.inner + bytes_of(rows, stack->inner, dtype);
    own.other = own.attended + bytes_of(rows, attended, dtype);
    return own;
}

/* Norms of rows of the residual stream. */
INLINE void norm_tile(const int dtype, const struct stack *stack, const struct batch *batch, struct rows_of_task rows,
                      const void *weight, char *normed)
{
    for (int64_t row = 0; row < rows.count; row++)
        norm_row(at(batch->hidden, (rows.row + row) * stack->hidden, dtype), NULL, weight,
                 at(normed, row * stride_of(stack->hidden, dtype), dtype), stack->hidden, stack->eps, dtype);
}

/* Norms, rotates and writes the heads of one row, which is `position` of a span. */
INLINE void place_heads(const int dtype, const struct stack *stack, const struct batch *batch,
                        const struct layer *weights, int64_t layer, const struct span *span, int64_t row)
{
    const struct pass *pass = batch->pass;
    const int64_t width = pass->keys.width, queries = pass->kv_heads * pass->group, rotated = queries + pass->kv_heads;
    char *heads = at(batch->joined, row * (rotated + pass->kv_heads) * width, dtype);
    for (int64_t head = 0; weights->q_norm && head < rotated; head++)
        norm_row(at(heads, head * width, dtype), NULL, head < queries ? weights->q_norm : weights->k_norm,
                 at(heads, head * width, dtype), width, stack->eps, dtype);
    rotate_row(heads, batch->cos + row * width, batch->sin + row * width, rotated, width, dtype);
    const struct rows *pools[] = {&pass->keys, &pass->values};
    for (int64_t head = 0; head < 2 * pass->kv_heads; head++) {
        const struct rows *pool = pools[head / pass->kv_heads];
        const int64_t index = row_index(pass, pool, span, layer, head % pass->kv_heads, span->start + row - span->row);
        memcpy(at(pool->memory, index, dtype), at(heads, (queries + head) * width, dtype), width * item_bytes(dtype));
    }
}

INLINE void multiply(const int dtype, const enum then then, struct product product, const struct own *own)
{
    struct int8_rows quantized;
    if (product.int8) {
        quantized = int8_rows_at(product.packed, product.rows, own->other);
        EXPORT(quantize_rows)(product.packed, product.x, product.stride, product.rows, product.depth, quantized, dtype);
        product.x = &quantized;
    }
    multiply_tile(dtype, then, &product, 0, product.panels, own->blocks);
}

INLINE void project(const int dtype, const struct stack *stack, const struct batch *batch, struct rows_of_task rows,
                    int64_t layer, char *memory)
{
    const struct layer *weights = &stack->layers[layer];
    const struct pass *pass = batch->pass;
    const struct own own = own_at(dtype, stack, batch, memory);
    const int64_t columns = (pass->group + 2) * pass->kv_heads * pass->keys.width;
    norm_tile(dtype, stack, batch, rows, weights->input_norm, own.normed);
    multiply(dtype, STORE,
             (struct product){own.normed, weights->qkv, weights->qkv_bias, at(batch->joined, rows.row * columns, dtype),
                              stride_of(stack->hidden, dtype), columns, rows.count, columns / LANES, stack->hidden,
                              stack->int8},
             &own);
    const struct span *span = &pass->spans[rows.span];
    for (int64_t row = rows.row; row < rows.row + rows.count; row++) {
        while (row >= span->row + span->count)
            span++;
        place_heads(dtype, stack, batch, weights, layer, span, row);
    }
}

/* Attention of all heads of a tile, span by span. */
INLINE void attend(const int dtype, const struct batch *batch, struct rows_of_task rows, int64_t layer,
                   const struct own *own)
{
    const struct pass *pass = batch->pass;
    const int64_t width = pass->keys.width, columns = (pass->group + 2) * pass->kv_heads * width;
    const int64_t stride = stride_of(pass->kv_heads * pass->group * width, dtype), end = rows.row + rows.count;
    for (int64_t row = rows.row, index = rows.span; row < end; index++) {
        const struct span *span = &pass->spans[index];
        const int64_t after = span->row + span->count < end ? span->row + span->count : end;
        for (int64_t head = 0; head < pass->kv_heads; head++) {
            const struct item item = {index, head, row - span->row, after - row, ALL_SEGMENTS, 0};
            const void *query = at(batch->joined, row * columns + head * pass->group * width, dtype);
            void *to = at(own->attended, (row - rows.row) * stride + head * pass->group * width, dtype);
#if HAS_BFLOAT16
            if (dtype == BFLOAT16) {
                headrace_attend_item_bfloat16(pass, batch->scoring, &item, layer, query, columns, to, stride,
                                              own->other);
                continue;
            }
#endif
            struct scratch scratch = scratch_at(pass, item.count, own->other);
            attend_item(pass, batch->scoring, &item, layer, query, columns, to, stride, &scratch, NULL);
        }
        row = after;
    }
}

INLINE void finish(const int dtype, const struct stack *stack, const struct batch *batch, struct rows_of_task rows,
                   int64_t layer, char *memory)
{
    const struct layer *weights = &stack->layers[layer];
    const struct own own = own_at(dtype, stack, batch, memory);
    const int64_t hidden = stack->hidden, inner = stack->inner;
    const int64_t attended = batch->pass->kv_heads * batch->pass->group * batch->pass->keys.width;
    void *stream = at(batch->hidden, rows.row * hidden, dtype);
    attend(dtype, batch, rows, layer, &own);
    multiply(dtype, ADD,
             (struct product){own.attended, weights->output, weights->output_bias, stream, stride_of(attended, dtype),
                              hidden, rows.count, hidden / LANES, attended, stack->int8},
             &own);
    norm_tile(dtype, stack, batch, rows, weights->post_norm, own.normed);
    multiply(dtype, GATE,
             (struct product){own.normed, weights->gate_up, NULL, own.inner, stride_of(hidden, dtype),
                              stride_of(inner, dtype), rows.count, inner / LANES, hidden, stack->int8},
             &own);
    multiply(dtype, ADD,
             (struct product){own.inner, weights->down, NULL, stream, stride_of(inner, dtype), hidden, rows.count,
                              hidden / LANES, inner, stack->int8},
             &own);
}

/* The tasks of a dtype, and what runs a pass by them: see headrace_run_graph(). */
#define TASKS(name, dtype)                                                                                            \
    static int64_t bytes_##name(const struct stack *stack, const struct batch *batch)                                 \
    {                                                                                                                 \
        return task_bytes(dtype, stack, batch);                                                                       \
    }                                                                                                                 \
    static void project_##name(const struct stack *stack, const struct batch *batch, struct rows_of_task rows,        \
                               int64_t layer, char *memory)                                                           \
    {                                                                                                                 \
        project(dtype, stack, batch, rows, layer, memory);                                                            \
    }                                                                                                                 \
    static void finish_##name(const struct stack *stack, const struct batch *batch, struct rows_of_task rows,         \
                              int64_t layer, char *memory)                                                            \
    {                                                                                                                 \
        finish(dtype, stack, batch, rows, layer, memory);                                                             \
    }                                                                                                                 \
    int EXPORT(run_##name)(const struct stack *stack, const struct batch *batch)                                      \
    {                                                                                                                 \
        return headrace_run_graph(&(struct tasks){bytes_##name, project_##name, finish_##name}, stack, batch);        \
    }

TASKS(float32, FLOAT32)
#if HAS_BFLOAT16
TASKS(bfloat16, BFLOAT16)
#endif
