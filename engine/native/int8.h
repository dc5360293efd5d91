/* Matrix products in 8 bits: rows quantised as they come times weights quantised when they were loaded.
 *
 * Both have a scale for every block of depth: of 32 elements as in GGUF's Q8_0, or of more. A block of x becomes
 * round(x * 127 / max|x|), stored as that + 128 without a sign, as VNNI wants it. Sums of integers within a block are exact
 * and blocks are added one after the other, so a row's product depends on nothing but the row, and every instruction set
 * gives the same one.
 */

#include "multiply_int8.h"
#include "simd.h"

#define INT8_ROWS (WIDE == 16 ? 6 : 2) /* of x at a time: as many sums, of integers and of floats, as registers hold */
#define FEW_ROWS (1 + SPARE_ROWS)      /* at a time, of what is left */
#define INT8_ITEM_ROWS 192             /* of x per work item, a multiple of INT8_ROWS */
#define INT8_ITEM_PANELS 4             /* of the matrix per work item */
#define INT8_GATE_ROWS 96              /* of x at a time, whose gates and ups stay in the L1 cache */
#define QUANTIZED_ZERO 128

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

/* Quantises a block and returns its scale: NaN if an element is not finite, so that the product is, too. */
INLINE float quantize_block(const void *x, uint8_t *quantized, int64_t width, int dtype)
{
    const ivec sign = (ivec)splat(-0.0f);
    vec tops = splat(0), nothing = splat(0), v;
    BY_VECTORS(width, (v = load_part(x, i, n, dtype), tops = vec_max((vec)(~sign & (ivec)v), tops), nothing += v * 0));
    const float top = horizontal_max(tops), factor = top > 1e-30f ? 127 / top : 0;
    BY_VECTORS(width, quantize_part(x, quantized, factor, i, n, dtype));
    return (factor > 0 ? top / 127 : 0) + horizontal_sum(nothing);
}

/* Quantises a row of `width` elements, filled up to the matrix's depth. */
INLINE void quantize_row(const void *x, struct int8_rows to, int64_t width, const struct int8_matrix *matrix, int dtype)
{
    const int64_t depth = matrix->depth, block = matrix->block;
    memset(to.values + width, QUANTIZED_ZERO, depth - width);
    for (int64_t from = 0; from < depth; from += block, to.scales++) {
        const int64_t left = width > from ? width - from : 0;
        *to.scales = quantize_block(at(x, from, dtype), to.values + from, left < block ? left : block, dtype);
    }
}

/* n rows of x times one panel of the matrix, plus the panel's bias. The first `count` are stored, `stride` elements
 * apart. */
INLINE void multiply_panel(int n, int64_t count, const struct int8_matrix *matrix, int64_t panel, struct int8_rows x,
                           const float *bias, void *out, int64_t stride, int64_t dtype)
{
    const int64_t depth = matrix->depth, block = matrix->block, blocks = blocks_of(matrix);
    const int8_t *values = matrix->values + panel * depth * LANES;
    const float *scales = matrix->scales + panel * blocks * LANES;
    const int32_t *zeros = matrix->zeros + panel * blocks * LANES;
    vec sums[INT8_ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
        sums[i][0] = sums[i][1] = splat(0);
    for (int64_t b = 0; b < blocks; b++, scales += LANES, zeros += LANES) {
        ivec low[INT8_ROWS], high[INT8_ROWS];
#pragma GCC unroll 6
        for (int i = 0; i < n; i++)
            low[i] = *(const ivec *)zeros, high[i] = *(const ivec *)(zeros + WIDE);
        for (int64_t k = b * block; k < (b + 1) * block; k += QUAD, values += QUAD * LANES) {
            const struct quads w0 = load_quads(values), w1 = load_quads(values + QUAD * WIDE);
#pragma GCC unroll 6
            for (int i = 0; i < n; i++) {
                uint32_t quad;
                memcpy(&quad, x.values + i * depth + k, QUAD);
                low[i] = add_quads(low[i], quad, w0);
                high[i] = add_quads(high[i], quad, w1);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < n; i++) {
            const vec scale = splat(x.scales[i * blocks + b]);
            sums[i][0] += __builtin_convertvector(low[i], vec) * (load(scales) * scale);
            sums[i][1] += __builtin_convertvector(high[i], vec) * (load(scales + WIDE) * scale);
        }
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        const int64_t left = matrix->columns - panel * LANES - side * WIDE, width = left < WIDE ? left : WIDE;
        if (width <= 0)
            break;
        const vec shift = bias ? load_part(bias, side * WIDE, width, FLOAT32) : splat(0);
#pragma GCC unroll 6
        for (int i = 0; i < n; i++)
            if (i < count)
                store_part(at(out, i * stride, dtype), side * WIDE, width, round_to(sums[i][side] + shift, dtype), dtype);
    }
}

void EXPORT(quantize_rows)(const struct int8_matrix *matrix, const void *x, int64_t stride, int64_t rows, int64_t width,
                           struct int8_rows to, int64_t dtype)
{
    for (int64_t row = 0; row < rows; row++) {
        const struct int8_rows own = int8_rows_from(matrix, to, row);
        if (dtype == FLOAT32)
            quantize_row(at(x, row * stride, FLOAT32), own, width, matrix, FLOAT32);
        else
            quantize_row(at(x, row * stride, BFLOAT16), own, width, matrix, BFLOAT16);
    }
}

void EXPORT(multiply_rows_int8)(const struct int8_matrix *matrix, int64_t panel, int64_t rows, struct int8_rows x,
                                const float *bias, void *out, int64_t stride, int64_t dtype)
{
    for (int64_t i = 0, n; i < rows; i += n) {
        const struct int8_rows from = int8_rows_from(matrix, x, i);
        void *to = at(out, i * stride, dtype);
        if (rows - i >= INT8_ROWS) {
            n = INT8_ROWS;
            multiply_panel(INT8_ROWS, n, matrix, panel, from, bias, to, stride, dtype);
        } else {
            n = rows - i < FEW_ROWS ? rows - i : FEW_ROWS;
            multiply_panel(FEW_ROWS, n, matrix, panel, from, bias, to, stride, dtype);
        }
    }
}

/* silu(gate) * up for the panels of both halves of a matrix, from x to rows of out that are `stride` elements apart. */
INLINE void multiply_gate_panels(const struct int8_matrix *matrix, int64_t panel, int64_t rows, struct int8_rows x,
                                 void *out, int64_t stride, int dtype)
{
    const int64_t panels = matrix->columns / LANES / 2;
    float halves[2][INT8_GATE_ROWS * LANES] __attribute__((aligned(64)));
    for (int64_t row = 0; row < rows; row += INT8_GATE_ROWS) {
        const int64_t count = rows - row < INT8_GATE_ROWS ? rows - row : INT8_GATE_ROWS;
        const struct int8_rows from = int8_rows_from(matrix, x, row);
        for (int half = 0; half < 2; half++)
            EXPORT(multiply_rows_int8)(matrix, half * panels + panel, count, from, NULL, halves[half], LANES, FLOAT32);
        for (int64_t i = 0; i < count; i++)
            for (int64_t lane = 0; lane < LANES; lane += WIDE) {
                const vec gate = round_to(load(halves[0] + i * LANES + lane), dtype);
                const vec up = round_to(load(halves[1] + i * LANES + lane), dtype);
                store_part(at(out, (row + i) * stride, dtype), lane, WIDE, swiglu(gate, up, dtype), dtype);
            }
    }
}

/* out = x [rows, width] times the transpose of a matrix of 8 bits, plus bias [columns] (float32, NULL if there is none).
 * gate: halves of the product are then made one, as silu(first) * second; halves are multiples of LANES, and there is no
 * bias. x, out: dense, of one dtype; width: the matrix's depth, or less. Returns -1 when memory ran out. */
int EXPORT(multiply_int8)(const void *x, int64_t width, const struct int8_matrix *matrix, const float *bias, void *out,
                          int64_t rows, int64_t dtype, int64_t gate)
{
    const int64_t columns = gate ? matrix->columns / 2 : matrix->columns, panels = (columns + LANES - 1) / LANES;
    const int64_t at_once = gate ? INT8_ITEM_PANELS / 2 : INT8_ITEM_PANELS, across = (panels + at_once - 1) / at_once;
    const int64_t down = (rows + INT8_ITEM_ROWS - 1) / INT8_ITEM_ROWS;
    char *memory = aligned_alloc(64, int8_bytes(matrix, rows));
    if (!memory)
        return -1;
    const struct int8_rows quantized = int8_rows_at(matrix, rows, memory);
#pragma omp parallel if (rows > 1 || across > 1)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            EXPORT(quantize_rows)(matrix, at(x, row * width, dtype), width, 1, width,
                                  int8_rows_from(matrix, quantized, row), dtype);
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < across * down; piece++) {
            const int64_t first = piece % across * at_once, last = first + at_once < panels ? first + at_once : panels;
            const int64_t row = piece / across * INT8_ITEM_ROWS;
            const int64_t count = row + INT8_ITEM_ROWS < rows ? INT8_ITEM_ROWS : rows - row;
            const struct int8_rows from = int8_rows_from(matrix, quantized, row);
            for (int64_t panel = first; panel < last; panel++) {
                void *to = at(out, row * columns + panel * LANES, dtype);
                const float *shift = bias ? bias + panel * LANES : NULL;
                if (!gate)
                    EXPORT(multiply_rows_int8)(matrix, panel, count, from, shift, to, columns, dtype);
                else if (dtype == FLOAT32)
                    multiply_gate_panels(matrix, panel, count, from, to, columns, FLOAT32);
                else
                    multiply_gate_panels(matrix, panel, count, from, to, columns, BFLOAT16);
            }
        }
    }
    free(memory);
    return 0;
}
