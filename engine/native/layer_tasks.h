/* The tasks of a layer over a tile of rows (graph.h), each on one thread: dense layers with grouped-query attention, in
 * float32, and in bfloat16 where LANES is 32, by weights of the same dtype or in 8 bits. Rounded where the kernels of
 * elementwise.h, multiply_tile.h and int8.h round. */

#ifndef HEADRACE_LAYER_TASKS_H
#define HEADRACE_LAYER_TASKS_H

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

/* Of a tile. */
static int64_t most_rows(const struct batch *batch) { return batch->tile_rows ? batch->tile_rows : batch->rows; }

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
    const int64_t rows = most_rows(batch), heads = pass->kv_heads * pass->group;
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
    const int64_t rows = most_rows(batch), attended = batch->pass->kv_heads * batch->pass->group * batch->pass->keys.width;
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

/* Places the heads of all rows of a tile. */
INLINE void place_tile(const int dtype, const struct stack *stack, const struct batch *batch, struct rows_of_task rows,
                       int64_t layer)
{
    const struct span *span = &batch->pass->spans[rows.span];
    for (int64_t row = rows.row; row < rows.row + rows.count; row++) {
        while (row >= span->row + span->count)
            span++;
        place_heads(dtype, stack, batch, &stack->layers[layer], layer, span, row);
    }
}

/* The products of a layer. */
enum weight { QKV, OUTPUT, GATE_UP, DOWN };

/* What comes with each. */
INLINE enum then then_of(enum weight which) { return which == QKV ? STORE : which == GATE_UP ? GATE : ADD; }

/* A product of `count` rows from `row` of the batch on; own: what its other rows are in or come from. */
INLINE struct product product_of(const int dtype, const enum weight which, const struct stack *stack,
                                 const struct batch *batch, int64_t row, int64_t count, int64_t layer,
                                 const struct own *own)
{
    const struct layer *weights = &stack->layers[layer];
    const struct pass *pass = batch->pass;
    const int64_t hidden = stack->hidden, inner = stack->inner, width = pass->keys.width;
    const int64_t attended = pass->kv_heads * pass->group * width, columns = attended + 2 * pass->kv_heads * width;
    void *stream = at(batch->hidden, row * hidden, dtype), *joined = at(batch->joined, row * columns, dtype);
    const int64_t normed_stride = stride_of(hidden, dtype), inner_stride = stride_of(inner, dtype);
    const struct product products[] = {
        [QKV] = {own->normed, weights->qkv, weights->qkv_bias, joined, normed_stride, columns, count, columns / LANES,
                 hidden, stack->int8},
        [OUTPUT] = {own->attended, weights->output, weights->output_bias, stream, stride_of(attended, dtype), hidden,
                    count, hidden / LANES, attended, stack->int8},
        [GATE_UP] = {own->normed, weights->gate_up, NULL, own->inner, normed_stride, inner_stride, count, inner / LANES,
                     hidden, stack->int8},
        [DOWN] = {own->inner, weights->down, NULL, stream, inner_stride, hidden, count, hidden / LANES, inner,
                  stack->int8},
    };
    return products[which];
}

/* A product of a tile. */
INLINE void multiply(const int dtype, const enum weight which, const struct stack *stack, const struct batch *batch,
                     struct rows_of_task rows, int64_t layer, const struct own *own)
{
    struct product product = product_of(dtype, which, stack, batch, rows.row, rows.count, layer, own);
    struct int8_rows quantized;
    if (product.int8) {
        quantized = int8_rows_at(product.packed, product.rows, own->other);
        EXPORT(quantize_rows)(product.packed, product.x, product.stride, product.rows, product.depth, quantized, dtype);
        product.x = &quantized;
    }
    multiply_tile(dtype, then_of(which), &product, 0, product.panels, own->blocks);
}

INLINE void project(const int dtype, const struct stack *stack, const struct batch *batch, struct rows_of_task rows,
                    int64_t layer, char *memory)
{
    const struct layer *weights = &stack->layers[layer];
    const struct own own = own_at(dtype, stack, batch, memory);
    norm_tile(dtype, stack, batch, rows, weights->input_norm, own.normed);
    multiply(dtype, QKV, stack, batch, rows, layer, &own);
    place_tile(dtype, stack, batch, rows, layer);
}

/* Attention of a work item. to: of the first row of the batch. */
INLINE void attend_one(const int dtype, const struct batch *batch, const struct item *item, int64_t layer, void *to,
                       char *memory, float *partials)
{
    const struct pass *pass = batch->pass;
    const int64_t width = pass->keys.width, columns = (pass->group + 2) * pass->kv_heads * width;
    const int64_t stride = stride_of(pass->kv_heads * pass->group * width, dtype);
    const int64_t row = pass->spans[item->span].row + item->first, before = item->head * pass->group * width;
    const void *query = at(batch->joined, row * columns + before, dtype);
    void *output = at(to, row * stride + before, dtype);
#if HAS_BFLOAT16
    if (dtype == BFLOAT16) {
        headrace_attend_item_bfloat16(pass, batch->scoring, item, layer, query, columns, output, stride, memory, partials);
        return;
    }
#endif
    struct scratch scratch = scratch_at(pass, item->count, memory);
    attend_item(pass, batch->scoring, item, layer, query, columns, output, stride, &scratch, partials);
}

/* Attention of all heads of a tile, span by span. */
INLINE void attend(const int dtype, const struct batch *batch, struct rows_of_task rows, int64_t layer,
                   const struct own *own)
{
    const struct pass *pass = batch->pass;
    const int64_t stride = stride_of(pass->kv_heads * pass->group * pass->keys.width, dtype), end = rows.row + rows.count;
    for (int64_t row = rows.row, index = rows.span; row < end; index++) {
        const struct span *span = &pass->spans[index];
        const int64_t after = span->row + span->count < end ? span->row + span->count : end;
        for (int64_t head = 0; head < pass->kv_heads; head++) {
            const struct item item = {index, head, row - span->row, after - row, ALL_SEGMENTS, 0};
            attend_one(dtype, batch, &item, layer, at(own->attended, -rows.row * stride, dtype), own->other, NULL);
        }
        row = after;
    }
}

INLINE void finish(const int dtype, const struct stack *stack, const struct batch *batch, struct rows_of_task rows,
                   int64_t layer, char *memory)
{
    const struct own own = own_at(dtype, stack, batch, memory);
    attend(dtype, batch, rows, layer, &own);
    multiply(dtype, OUTPUT, stack, batch, rows, layer, &own);
    norm_tile(dtype, stack, batch, rows, stack->layers[layer].post_norm, own.normed);
    multiply(dtype, GATE_UP, stack, batch, rows, layer, &own);
    multiply(dtype, DOWN, stack, batch, rows, layer, &own);
}

#endif
