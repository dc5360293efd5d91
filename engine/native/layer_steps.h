/* The steps of a layer over all rows of a pass (graph.h), each divided into items, and what runs a pass by them or by the
 * tasks of tiles. */

#include "layer_tasks.h"

#define ROWS_AT_ONCE 4     /* of an item that goes row by row */
#define ITEMS_PER_THREAD 4 /* of a product, if it has as many panels */

/* In their order; the first are products. */
enum step { NORM = DOWN + 1, PLACE, ATTEND, MERGE, QUANTIZE_ATTENDED, POST_NORM, QUANTIZE_INNER };
static const int step_order[] = {NORM,   QKV,       PLACE,   ATTEND,         MERGE, QUANTIZE_ATTENDED,
                                 OUTPUT, POST_NORM, GATE_UP, QUANTIZE_INNER, DOWN};
#define STEPS ((int64_t)(sizeof(step_order) / sizeof(*step_order)))

/* Panels of an item of a product, which has TILE_ROWS rows. */
static int64_t panels_of_item(const struct product *whole)
{
    const int64_t panels = whole->panels / (ITEMS_PER_THREAD * omp_get_max_threads());
    return panels < 1 ? 1 : panels > AT_ONCE ? AT_ONCE : panels;
}

/* Rows of an item that is no product. */
static struct rows_of_task rows_of_item(const struct batch *batch, int64_t item)
{
    const int64_t row = item * ROWS_AT_ONCE, left = batch->rows - row;
    struct rows_of_task rows = {row, left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE, 0};
    while (batch->pass->spans[rows.span].row + batch->pass->spans[rows.span].count <= row)
        rows.span++;
    return rows;
}

static int64_t items_of_step(const struct stack *stack, const struct batch *batch, int64_t step)
{
    const int which = step_order[step];
    if (which == ATTEND)
        return batch->pass->item_count;
    if (which == MERGE)
        return batch->pass->merge_count;
    if ((which == QUANTIZE_ATTENDED || which == QUANTIZE_INNER) && !stack->int8)
        return 0;
    if (which > DOWN)
        return (batch->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const struct product whole = product_of(FLOAT32, which, stack, batch, 0, batch->rows, 0, &(struct own){NULL});
    const int64_t each = panels_of_item(&whole);
    return (whole.panels + each - 1) / each * ((whole.rows + TILE_ROWS - 1) / TILE_ROWS);
}

/* What all rows become on their way, as own_at() has it, and the sums of attention over single segments behind that. */
INLINE int64_t shared_bytes(const int dtype, const struct stack *stack, const struct batch *batch)
{
    int64_t partials = partial_bytes(batch->pass);
#if HAS_BFLOAT16
    if (dtype == BFLOAT16)
        partials = headrace_partial_bytes_bfloat16(batch->pass);
#endif
    return (task_bytes(dtype, stack, batch) + 63) / 64 * 64 + partials;
}

/* Part of a product whose rows are quantised already, in 8 bits. */
INLINE void multiply_part(const int dtype, const enum weight which, const struct stack *stack, const struct batch *batch,
                          int64_t layer, int64_t item, const struct own *all, void *blocks)
{
    const struct product whole = product_of(dtype, which, stack, batch, 0, batch->rows, layer, all);
    const int64_t each = panels_of_item(&whole), across = (whole.panels + each - 1) / each;
    const int64_t row = item / across * TILE_ROWS, first = item % across * each;
    struct product part = rows_from(dtype, &whole, row);
    struct int8_rows quantized;
    if (part.int8) {
        quantized = int8_rows_from(part.packed, int8_rows_at(part.packed, whole.rows, all->other), row);
        part.x = &quantized;
    }
    multiply_tile(dtype, then_of(which), &part, first, first + each < part.panels ? first + each : part.panels, blocks);
}

/* Quantises some rows of a product in 8 bits. */
INLINE void quantize_some(const int dtype, const enum weight which, const struct stack *stack, const struct batch *batch,
                          int64_t layer, struct rows_of_task rows, const struct own *all)
{
    const struct product of = product_of(dtype, which, stack, batch, 0, batch->rows, layer, all);
    const struct int8_rows to = int8_rows_at(of.packed, of.rows, all->other);
    EXPORT(quantize_rows)(of.packed, at(of.x, rows.row * of.stride, dtype), of.stride, rows.count, of.depth,
                          int8_rows_from(of.packed, to, rows.row), dtype);
}

/* Norms of some rows, quantised for the product that takes them. */
INLINE void norm_part(const int dtype, const enum weight which, const struct stack *stack, const struct batch *batch,
                      int64_t layer, struct rows_of_task rows, const struct own *all)
{
    const struct layer *weights = &stack->layers[layer];
    norm_tile(dtype, stack, batch, rows, which == QKV ? weights->input_norm : weights->post_norm,
              at(all->normed, rows.row * stride_of(stack->hidden, dtype), dtype));
    if (stack->int8)
        quantize_some(dtype, which, stack, batch, layer, rows, all);
}

INLINE void merge_one(const int dtype, const struct batch *batch, const struct item *merge, void *to, float *partials)
{
    const struct pass *pass = batch->pass;
    const int64_t width = pass->keys.width, stride = stride_of(pass->kv_heads * pass->group * width, dtype);
    const int64_t row = pass->spans[merge->span].row + merge->first;
    void *output = at(to, row * stride + merge->head * pass->group * width, dtype);
#if HAS_BFLOAT16
    if (dtype == BFLOAT16) {
        headrace_merge_item_bfloat16(pass, batch->scoring, merge, output, stride, partials);
        return;
    }
#endif
    merge_item(pass, batch->scoring, merge, output, stride, partials);
}

INLINE void run_item(const int dtype, const struct stack *stack, const struct batch *batch, int64_t layer, int64_t step,
                     int64_t item, char *shared, char *memory)
{
    const struct pass *pass = batch->pass;
    const struct own own = own_at(dtype, stack, batch, memory), all = own_at(dtype, stack, batch, shared);
    float *partials = (float *)(shared + (task_bytes(dtype, stack, batch) + 63) / 64 * 64);
    const int which = step_order[step];
    if (which <= DOWN)
        multiply_part(dtype, which, stack, batch, layer, item, &all, own.blocks);
    else if (which == ATTEND)
        attend_one(dtype, batch, &pass->items[item], layer, all.attended, own.other, partials);
    else if (which == MERGE)
        merge_one(dtype, batch, &pass->merges[item], all.attended, partials);
    else {
        const struct rows_of_task rows = rows_of_item(batch, item);
        if (which == PLACE)
            place_tile(dtype, stack, batch, rows, layer);
        else if (which == NORM || which == POST_NORM)
            norm_part(dtype, which == NORM ? QKV : GATE_UP, stack, batch, layer, rows, &all);
        else
            quantize_some(dtype, which == QUANTIZE_ATTENDED ? OUTPUT : DOWN, stack, batch, layer, rows, &all);
    }
}

/* The tasks and steps of a dtype, and what runs a pass by them: see headrace_run_graph(). */
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
    static int64_t shared_##name(const struct stack *stack, const struct batch *batch)                                \
    {                                                                                                                 \
        return shared_bytes(dtype, stack, batch);                                                                     \
    }                                                                                                                 \
    static void run_item_##name(const struct stack *stack, const struct batch *batch, int64_t layer, int64_t step,    \
                                int64_t item, char *shared, char *memory)                                             \
    {                                                                                                                 \
        run_item(dtype, stack, batch, layer, step, item, shared, memory);                                             \
    }                                                                                                                 \
    int EXPORT(run_##name)(const struct stack *stack, const struct batch *batch)                                      \
    {                                                                                                                 \
        const struct tasks tasks = {bytes_##name, project_##name, finish_##name, STEPS, items_of_step,                \
                                    shared_##name, run_item_##name};                                                  \
        return headrace_run_graph(&tasks, stack, batch);                                                              \
    }

TASKS(float32, FLOAT32)
#if HAS_BFLOAT16
TASKS(bfloat16, BFLOAT16)
#endif
