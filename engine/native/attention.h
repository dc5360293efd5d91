/* What the attention kernels have in common: the records of a pass, which kernel_calls.py mirrors, and where
 * keys and values are in the paged pool. */

#ifndef HEADRACE_ATTENTION_H
#define HEADRACE_ATTENTION_H

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>

/* Rows [row, row + count) of the batch are positions [start, start + count) of one request; pages: ids covering
 * [0, start + count). */
struct span {
    int64_t start, count, row;
    const int64_t *pages;
};

/* A work item: the queries of `count` tokens from `first` of one span, for one KV head, over all segments of positions
 * or over one of them. */
struct item {
    int64_t span, head, first, count;
    int64_t segment; /* ALL_SEGMENTS, or the one that it is over */
    int64_t partial; /* the place of what is summed over a single segment */
};

#define ALL_SEGMENTS -1

/* Keys, or values, of a pool: [pages, layers, heads, page_size, width], in any order of layers and heads. Strides are in
 * elements; head_stride 0: all heads have the same. */
struct rows {
    const void *memory;
    int64_t page_stride, layer_stride, head_stride, width;
};

/* One forward pass. group: query heads per KV head; most_tokens: of any item.
 *
 * A row attends to positions [begin, end): causally from 0 on where begins is NULL. Begins and ends never decrease from
 * a row of a span to the next, so an item reads nothing before the begin of its first row: those pages may be others'.
 *
 * What a row sums starts anew with every segment, which begins at a multiple of `segment` positions, and segments are
 * merged in their order. So a row has the same bits whether one thread visits all of its segments or several do. */
struct pass {
    struct rows keys, values; /* values.memory NULL: a value is the first elements of its key, as of latents */
    int64_t dtype, page_size, kv_heads, group;
    const int32_t *begins, *ends; /* [rows of the batch] */
    const struct span *spans;
    const struct item *items; /* the most expensive first */
    int64_t item_count, most_tokens;
    int64_t segment;           /* positions, a multiple of every kernel's tile */
    const struct item *merges; /* items that were split: partials of all segments up to `segment` */
    int64_t merge_count, partial_count;
};

/* How scores of queries and keys become weights. */
struct scoring {
    float scale;        /* of the scores, times log2(e) */
    float cap;          /* 0, or scores become cap * tanh(scores / cap): times log2(e), too */
    const float *sinks; /* NULL, or [heads]: one more score of each head, times log2(e), that has no value */
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Index of a position's key or value. */
static inline int64_t row_index(const struct pass *pass, const struct rows *rows, const struct span *span, int64_t layer,
                                int64_t head, int64_t position)
{
    const int64_t page = span->pages[position / pass->page_size], slot = position % pass->page_size;
    return page * rows->page_stride + layer * rows->layer_stride + head * rows->head_stride + slot * rows->width;
}

/* How many positions from this one on, up to `count`, have their keys one after the other in the same page. */
static inline int64_t run_length(const struct pass *pass, int64_t position, int64_t count)
{
    return least(pass->page_size - position % pass->page_size, count);
}

/* Brings keys and values of positions [from, after), of so many bytes an element, into the L2 cache. */
static inline void prefetch_rows(const struct pass *pass, const struct span *span, int64_t layer, int64_t head,
                                 int64_t from, int64_t after, int64_t bytes)
{
    const struct rows *pools[] = {&pass->keys, &pass->values};
    for (int64_t run; from < after; from += run) {
        run = run_length(pass, from, after - from);
        for (int i = 0; i < 2 && pools[i]->memory; i++) {
            const int64_t index = row_index(pass, pools[i], span, layer, head, from);
            for (int64_t line = 0; line < run * pools[i]->width * bytes; line += 64)
                __builtin_prefetch((const char *)pools[i]->memory + index * bytes + line, 0, 2);
        }
    }
}

/* One past the last position that a row of an item attends to; lanes behind the rows are as the last one. */
static inline int32_t end_of(const struct pass *pass, const struct item *item, int64_t row)
{
    const int64_t last = item->count * pass->group - 1, token = item->first + (row < last ? row : last) / pass->group;
    const struct span *span = &pass->spans[item->span];
    return pass->ends ? pass->ends[span->row + token] : (int32_t)(span->start + token + 1);
}

/* The first position that it attends to. */
static inline int32_t begin_of(const struct pass *pass, const struct item *item, int64_t row)
{
    const int64_t last = item->count * pass->group - 1, token = item->first + (row < last ? row : last) / pass->group;
    return pass->begins ? pass->begins[pass->spans[item->span].row + token] : 0;
}

/* Whether it attends to any position of the segment that begins at `from`. */
static inline int sees_segment(const struct pass *pass, const struct item *item, int64_t row, int64_t from)
{
    return end_of(pass, item, row) > from && begin_of(pass, item, row) < from + pass->segment;
}

/* Attention of one work item over all segments, in bfloat16, on one thread. query, output: of its first token and head;
 * tokens are query_stride and stride elements apart. memory: headrace_attend_bytes_bfloat16() of its tokens, in whole
 * cache lines. Of an item over one segment the sums go to partials, which the merge of all of them takes. */
void headrace_attend_item_bfloat16(const struct pass *pass, const struct scoring *scoring, const struct item *item,
                                   int64_t layer, const void *query, int64_t query_stride, void *output,
                                   int64_t stride, char *memory, float *partials);
void headrace_merge_item_bfloat16(const struct pass *pass, const struct scoring *scoring, const struct item *merge,
                                  void *output, int64_t stride, float *partials);
int64_t headrace_attend_bytes_bfloat16(const struct pass *pass, int64_t tokens);
int64_t headrace_partial_bytes_bfloat16(const struct pass *pass);

/* Working memory for every thread that OpenMP may start, *bytes each, rounded up to whole cache lines, and `shared` bytes
 * behind that. NULL when memory ran out. */
static inline char *new_scratch(int64_t *bytes, int64_t shared)
{
    *bytes = (*bytes + 63) / 64 * 64;
    return aligned_alloc(64, *bytes * omp_get_max_threads() + (shared + 63) / 64 * 64);
}

#endif
