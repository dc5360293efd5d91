/* Products in 8 bits, of quantised rows by panels of a quantised weight: see int8.h. Those with vectors of 512 bits are for
 * CPUs of which headrace_has_512_vnni() is true. */

#ifndef HEADRACE_MULTIPLY_INT8_H
#define HEADRACE_MULTIPLY_INT8_H

#include <stdint.h>

#define QUAD 4         /* elements of depth that one instruction multiplies and adds */
#define SPARE_ROWS 1   /* of any content, behind the rows of a product */

/* A matrix [columns, depth] of 8 bits. */
struct int8_matrix {
    const int8_t *values; /* [panels, depth / QUAD, LANES, QUAD], columns and depth filled up with zeros */
    const float *scales;  /* [panels, blocks, LANES] */
    const int32_t *zeros; /* [panels, blocks, LANES]: -QUANTIZED_ZERO times the sum of a column's values in a block */
    int64_t columns, depth;
    int64_t block; /* elements of depth that share a scale, a multiple of QUAD; divides depth */
};

/* Rows of x, quantised. */
struct int8_rows {
    uint8_t *values; /* [rows + SPARE_ROWS, depth] */
    float *scales;   /* [rows + SPARE_ROWS, blocks] */
};

static inline int64_t blocks_of(const struct int8_matrix *matrix) { return matrix->depth / matrix->block; }

/* Bytes of so many rows, in whole cache lines, and the rows in as much memory. */
static inline int64_t int8_bytes(const struct int8_matrix *matrix, int64_t rows)
{
    return ((rows + SPARE_ROWS) * (matrix->depth + blocks_of(matrix) * (int64_t)sizeof(float)) + 63) / 64 * 64;
}
static inline struct int8_rows int8_rows_at(const struct int8_matrix *matrix, int64_t rows, char *memory)
{
    return (struct int8_rows){(uint8_t *)memory, (float *)(memory + (rows + SPARE_ROWS) * matrix->depth)};
}
static inline struct int8_rows int8_rows_from(const struct int8_matrix *matrix, struct int8_rows rows, int64_t row)
{
    return (struct int8_rows){rows.values + row * matrix->depth, rows.scales + row * blocks_of(matrix)};
}

/* Quantises rows of x [rows, width], `stride` elements apart, to the first of `to`. width: the matrix's depth, or less. */
void EXPORT(quantize_rows)(const struct int8_matrix *matrix, const void *x, int64_t stride, int64_t rows, int64_t width,
                           struct int8_rows to, int64_t dtype);

/* Rows times one panel of a matrix, plus the panel's bias (NULL: none), rounded to a dtype; out: `stride` elements apart.
 * Columns behind the matrix's last are not stored. */
void EXPORT(multiply_rows_int8)(const struct int8_matrix *matrix, int64_t panel, int64_t rows, struct int8_rows x,
                                const float *bias, void *out, int64_t stride, int64_t dtype);

#endif
