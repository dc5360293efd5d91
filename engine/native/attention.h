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

/* One forward pass. group: query heads per KV head; page_stride: elements of a page; most_tokens: of any item.
 *
 * What a row sums starts anew with every segment, which begins at a multiple of `segment` positions, and segments are
 * merged in their order. So a row has the same bits whether one thread visits all of its segments or several do. */
struct pass {
    const void *pool; /* [pages, layers, 2, kv_heads, page_size, width], or latents: [pages, layers, page_size, width] */
    int64_t dtype, page_size, page_stride, kv_heads, group, width;
    int64_t value_width; /* of values and results; width, or less where values are the first elements of their keys */
    int64_t layer_stride, head_stride, to_value; /* elements; head_stride 0: all heads have the same keys and values */
    const struct span *spans;
    const struct item *items; /* the most expensive first */
    int64_t item_count, most_tokens;
    int64_t segment;           /* positions, a multiple of every kernel's tile */
    const struct item *merges; /* items that were split: `segment` partials from `partial` on */
    int64_t merge_count, partial_count;
};

/* Index in the pool of a position's key. */
static inline int64_t key_index(const struct pass *pass, const struct span *span, int64_t layer, int64_t head,
                                int64_t position)
{
    const int64_t page = span->pages[position / pass->page_size], slot = position % pass->page_size;
    return page * pass->page_stride + layer * pass->layer_stride + head * pass->head_stride + slot * pass->width;
}

/* How many positions from this one on, up to `count`, have their keys one after the other in the same page. */
static inline int64_t run_length(const struct pass *pass, int64_t position, int64_t count)
{
    const int64_t left = pass->page_size - position % pass->page_size;
    return left < count ? left : count;
}

/* One past the last position that a row of an item attends to; lanes behind the rows are as the last one. */
static inline int32_t end_of(const struct pass *pass, const struct item *item, int64_t row)
{
    const int64_t last = item->count * pass->group - 1, token = (row < last ? row : last) / pass->group;
    return (int32_t)(pass->spans[item->span].start + item->first + token + 1);
}

/* Working memory for every thread that OpenMP may start, *bytes each, rounded up to whole cache lines, and `shared` bytes
 * behind that. NULL when memory ran out. */
static inline char *new_scratch(int64_t *bytes, int64_t shared)
{
    *bytes = (*bytes + 63) / 64 * 64;
    return aligned_alloc(64, *bytes * omp_get_max_threads() + (shared + 63) / 64 * 64);
}

#endif
