/* Matrix products in 8 bits: rows quantised as they come, one scale each, times weights quantised when they were loaded.
 *
 * x is quantised symmetrically: q = round(x * 127 / max|x|), which is stored as q + 128 without a sign, as VNNI wants
 * it. Sums of integers are exact, so a row's product depends on nothing but the row, and every instruction set gives the
 * same one. Weights have a scale per column or per block of depth and column (GGUF's Q8_0 has blocks of 32).
 */

#include "simd.h"

#define QUAD 4                               /* elements of depth that one instruction multiplies and adds */
#define INT8_ROWS (WIDE == 16 ? 12 : 4)  /* of x at a time: as many sums as the vector registers hold, */
#define BLOCK_ROWS (WIDE == 16 ? 6 : 2)  /* and where there are sums of integers and of floats */
#define FEW_ROWS 4                       /* at a time, of what is left */
#define INT8_ITEM_ROWS 192               /* of x per work item, a multiple of INT8_ROWS and BLOCK_ROWS */
#define INT8_ITEM_PANELS 4               /* of the matrix per work item */
#define QUANTIZED_ZERO 128

/* A matrix [columns, depth] of 8 bits. */
struct int8_matrix {
    const int8_t *values;  /* [panels, depth / QUAD, LANES, QUAD], columns and depth filled up with zeros */
    const float *scales;   /* [panels, blocks, LANES] */
    const int32_t *offsets; /* [panels, blocks, LANES]: QUANTIZED_ZERO times the sum of a column's values in a block */
    int64_t columns, depth; /* depth: a multiple of QUAD */
    int64_t block;          /* elements of depth that share a scale; divides depth */
};

/* sums += the products of four bytes of x, without a sign, and four of each lane of the weights. */
#if defined(__AVX512VNNI__) && WIDE == 16
struct quads {
    ivec all;
};
INLINE struct quads load_quads(const int8_t *from) { return (struct quads){*(const ivec *)from}; }
INLINE ivec add_quads(ivec sums, uint32_t x, struct quads weights)
{
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32((int)x), (__m512i)weights.all);
}
#elif defined(__AVX2__) && WIDE == 8
struct quads {
    __m256i even, odd; /* bytes 0 and 2, 1 and 3 of each lane, as 16 bits: pairs of 8 bits could overflow 16 */
};
INLINE struct quads load_quads(const int8_t *from)
{
    const __m256i all = _mm256_loadu_si256((const __m256i *)from);
    return (struct quads){_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
}
INLINE ivec add_quads(ivec sums, uint32_t x, struct quads weights)
{
    const __m256i even = _mm256_set1_epi32(x & 0x00ff00ff), odd = _mm256_set1_epi32(x >> 8 & 0x00ff00ff);
    return sums + (ivec)_mm256_madd_epi16(weights.even, even) + (ivec)_mm256_madd_epi16(weights.odd, odd);
}
#else
struct quads {
    ivec all;
};
INLINE struct quads load_quads(const int8_t *from) { return (struct quads){*(const ivec *)from}; }
INLINE ivec add_quads(ivec sums, uint32_t x, struct quads weights)
{
    for (int byte = 0; byte < QUAD; byte++)
        sums += (int32_t)(x >> 8 * byte & 0xff) * (ivec)((uvec)weights.all << (24 - 8 * byte) >> 24);
    return sums;
}
#endif

INLINE void quantize_part(const void *x, uint8_t *quantized, float factor, int64_t i, int64_t n, int dtype)
{
    typedef uint8_t bytes __attribute__((vector_size(WIDE), aligned(1), may_alias));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which is in the low bits */
    const bytes rounded = __builtin_convertvector((uvec)(load_part(x, i, n, dtype) * factor + magic), bytes);
    const bytes shifted = rounded + QUANTIZED_ZERO;
    memcpy(quantized + i, &shifted, n);
}

/* Quantises a row and returns its scale: NaN if an element is not finite, so that the product is, too. */
INLINE float quantize_row(const void *x, uint8_t *quantized, int64_t width, int dtype)
{
    const ivec sign = (ivec)splat(-0.0f);
    vec tops = splat(0), nothing = splat(0), v;
    BY_VECTORS(width, (v = load_part(x, i, n, dtype), tops = vec_max((vec)(~sign & (ivec)v), tops), nothing += v * 0));
    float top = 0;
    for (int lane = 0; lane < WIDE; lane++)
        top = tops[lane] > top ? tops[lane] : top;
    const float factor = top > 1e-30f ? 127 / top : 0;
    BY_VECTORS(width, quantize_part(x, quantized, factor, i, n, dtype));
    return (factor > 0 ? top / 127 : 0) + horizontal_sum(nothing);
}

/* sums += n rows of x times one block of a panel. values, scales and offsets: those of the block. */
INLINE void add_block(int n, vec sums[][2], const uint8_t *x, int64_t stride, const int8_t *values,
                      const float *scales, const int32_t *offsets, int64_t length)
{
    ivec low[INT8_ROWS], high[INT8_ROWS];
#pragma GCC unroll 12
    for (int i = 0; i < n; i++)
        low[i] = high[i] = (ivec)splat(0);
    for (int64_t k = 0; k < length; k += QUAD) {
        const struct quads w0 = load_quads(values + k * LANES), w1 = load_quads(values + k * LANES + WIDE * QUAD);
#pragma GCC unroll 12
        for (int i = 0; i < n; i++) {
            uint32_t quad;
            memcpy(&quad, x + i * stride + k, QUAD);
            low[i] = add_quads(low[i], quad, w0);
            high[i] = add_quads(high[i], quad, w1);
        }
    }
    const ivec low_offset = *(const ivec *)offsets, high_offset = *(const ivec *)(offsets + WIDE);
#pragma GCC unroll 12
    for (int i = 0; i < n; i++) {
        sums[i][0] += __builtin_convertvector(low[i] - low_offset, vec) * load(scales);
        sums[i][1] += __builtin_convertvector(high[i] - high_offset, vec) * load(scales + WIDE);
    }
}

/* n rows of x times one panel of the matrix, times the rows' scales, plus bias; the first `count` are stored. */
INLINE void multiply_panel(int n, int64_t count, int in_blocks, const struct int8_matrix *matrix, int64_t panel, const uint8_t *x,
                           const float *row_scales, const float *bias, void *out, int64_t dtype)
{
    vec sums[INT8_ROWS][2];
    const int64_t block = matrix->block, blocks = in_blocks ? matrix->depth / block : 1;
    const int8_t *values = matrix->values + panel * matrix->depth * LANES;
    const float *scales = matrix->scales + panel * blocks * LANES;
    const int32_t *offsets = matrix->offsets + panel * blocks * LANES;
#pragma GCC unroll 12
    for (int i = 0; i < n; i++)
        sums[i][0] = sums[i][1] = splat(0);
    for (int64_t i = 0; i < blocks; i++)
        add_block(n, sums, x + i * block, matrix->depth, values + i * block * LANES, scales + i * LANES,
                  offsets + i * LANES, block);
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        const int64_t from = panel * LANES + side * WIDE, left = matrix->columns - from;
        const int64_t width = left < WIDE ? left : WIDE;
        if (width <= 0)
            break;
        const vec shift = bias ? load_part(bias, from, width, FLOAT32) : splat(0);
#pragma GCC unroll 12
        for (int i = 0; i < n; i++)
            if (i < count) {
                const vec v = sums[i][side] * splat(row_scales[i]) + shift;
                store_part(at(out, i * matrix->columns, dtype), from, width, round_to(v, dtype), dtype);
            }
    }
}

/* The same for any number of rows: `most` at a time, then FEW_ROWS. x has FEW_ROWS - 1 rows more, of any content. */
INLINE void multiply_rows_int8(int most, int in_blocks, const struct int8_matrix *matrix, int64_t panel, int64_t rows,
                               const uint8_t *x, const float *row_scales, const float *bias, void *out, int64_t dtype)
{
    const int few = most < FEW_ROWS ? most : FEW_ROWS;
    for (int64_t i = 0, n; i < rows; i += n) {
        const uint8_t *from = x + i * matrix->depth;
        void *to = at(out, i * matrix->columns, dtype);
        n = rows - i < most ? (rows - i < few ? rows - i : few) : most;
        if (n == most)
            multiply_panel(most, most, in_blocks, matrix, panel, from, row_scales + i, bias, to, dtype);
        else
            multiply_panel(few, n, in_blocks, matrix, panel, from, row_scales + i, bias, to, dtype);
    }
}

/* out [rows, columns] = x [rows, width] times the transpose of a matrix of 8 bits, plus bias [columns] (float32, NULL if
 * there is none). x, out: dense, of one dtype; width: at most QUAD - 1 less than the matrix's depth. Returns -1 when memory ran out. */
int EXPORT(multiply_int8)(const void *x, int64_t width, const struct int8_matrix *matrix, const float *bias, void *out,
                          int64_t rows, int64_t dtype)
{
    const int64_t depth = matrix->depth, panels = (matrix->columns + LANES - 1) / LANES;
    const int64_t across = (panels + INT8_ITEM_PANELS - 1) / INT8_ITEM_PANELS;
    const int64_t down = (rows + INT8_ITEM_ROWS - 1) / INT8_ITEM_ROWS;
    const int64_t scale_bytes = (rows * sizeof(float) + 63) / 64 * 64;
    char *memory = aligned_alloc(64, (scale_bytes + (rows + FEW_ROWS - 1) * depth + 63) / 64 * 64);
    if (!memory)
        return -1;
    float *scales = (float *)memory;
    uint8_t *quantized = (uint8_t *)memory + scale_bytes;
#pragma omp parallel if (rows > 1 || across > 1)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            uint8_t *to = quantized + row * depth;
            memset(to + width, QUANTIZED_ZERO, depth - width);
            scales[row] = dtype == FLOAT32 ? quantize_row(at(x, row * width, FLOAT32), to, width, FLOAT32)
                                           : quantize_row(at(x, row * width, BFLOAT16), to, width, BFLOAT16);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < across * down; piece++) {
            const int64_t first = piece % across * INT8_ITEM_PANELS, row = piece / across * INT8_ITEM_ROWS;
            const int64_t last = first + INT8_ITEM_PANELS < panels ? first + INT8_ITEM_PANELS : panels;
            const int64_t count = row + INT8_ITEM_ROWS < rows ? INT8_ITEM_ROWS : rows - row;
            void *to = at(out, row * matrix->columns, dtype);
            for (int64_t panel = first; panel < last; panel++)
                if (matrix->block == depth)
                    multiply_rows_int8(INT8_ROWS, 0, matrix, panel, count, quantized + row * depth, scales + row, bias,
                                       to, dtype);
                else
                    multiply_rows_int8(BLOCK_ROWS, 1, matrix, panel, count, quantized + row * depth, scales + row,
                                       bias, to, dtype);
        }
    }
    free(memory);
    return 0;
}
