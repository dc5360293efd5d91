/* What the attention kernels have in common: the records of a pass, which engine/native/__init__.py mirrors, and where
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

/* A work item: the queries of `count` tokens from `first` of one span, for one KV head. */
struct item {
    int64_t span, head, first, count;
};

/* One forward pass. group: query heads per KV head; page_stride: elements of a page; most_tokens: of any item. */
struct pass {
    const void *pool; /* [pages, layers, 2, kv_heads, page_size, width] */
    int64_t dtype, page_size, page_stride, kv_heads, group, width;
    const struct span *spans;
    const struct item *items; /* the most expensive first */
    int64_t item_count, most_tokens;
};

/* Elements from a key to the value of the same position. */
static inline int64_t to_value(const struct pass *pass) { return pass->kv_heads * pass->page_size * pass->width; }

/* Index in the pool of a position's key. */
static inline int64_t key_index(const struct pass *pass, const struct span *span, int64_t layer, int64_t head,
                                int64_t position)
{
    const int64_t page = span->pages[position / pass->page_size], slot = position % pass->page_size;
    return page * pass->page_stride + 2 * layer * to_value(pass) + (head * pass->page_size + slot) * pass->width;
}

/* How many positions from this one on, up to `count`, have their keys one after the other in the same page. */
static inline int64_t run_length(const struct pass *pass, int64_t position, int64_t count)
{
    const int64_t left = pass->page_size - position % pass->page_size;
    return left < count ? left : count;
}

/* Working memory for every thread that OpenMP may start: *bytes each, rounded up to whole cache lines. NULL when memory
 * ran out. */
static inline char *new_scratch(int64_t *bytes)
{
    *bytes = (*bytes + 63) / 64 * 64;
    return aligned_alloc(64, *bytes * omp_get_max_threads());
}

#endif
