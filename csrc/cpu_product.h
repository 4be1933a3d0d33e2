/* The matrix product used by attention and linear layers, compiled once per level. C [rows, columns] = A [rows, depth]
 * B [depth, columns] for so few rows and columns that all sums stay in registers. Every sum accumulates over the depth
 * in ascending order in its own lane, so it does not depend on the other rows and columns. */

#define ROWS 6                        /* with AVX-512, 24 of 32 registers hold sums, */
#define VECTORS (LANES == 16 ? 4 : 2) /* otherwise 12 of 16 */
#define COLUMNS (VECTORS * LANES)

/* The words of A and B: a float; two bfloat16 adjacent in depth; or those in B, with two adjacent floats in A. */
enum words { FLOATS = 0, PAIRS = 1, PAIRS_OF_FLOATS = 2 };

INLINE void multiply(int rows, int vectors, const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride,
                     int depth, float *c, int64_t c_stride, enum words words) {
    const uvec upper = (uvec){0} + 0xffff0000u;
    vec sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
    for (int k = 0; k < depth; k++, b += b_stride) {
        vec column[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) memcpy(&column[v], b + v * LANES, sizeof(vec));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int at = words == PAIRS_OF_FLOATS ? 2 * k : k;
            vec factor = (vec)(a[r * a_stride + at] - (uvec){0}), next = factor;
            if (words == PAIRS_OF_FLOATS) next = (vec)(a[r * a_stride + at + 1] - (uvec){0});
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                if (words == FLOATS) sum[r][v] = multiply_add(factor, column[v], sum[r][v]);
                else if (words == PAIRS) sum[r][v] = multiply_add_pairs(factor, column[v], sum[r][v]);
                else {
                    sum[r][v] = multiply_add(factor, (vec)((uvec)column[v] << 16), sum[r][v]);
                    sum[r][v] = multiply_add(next, (vec)((uvec)column[v] & upper), sum[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) memcpy(c + r * c_stride + v * LANES, &sum[r][v], sizeof(vec));
}

/* Call `function` with a constant number of rows, from 1 to ROWS. */
#define BY_ROWS(rows, function, ...)         \
    switch (rows) {                          \
    case 1: function(1, __VA_ARGS__); break; \
    case 2: function(2, __VA_ARGS__); break; \
    case 3: function(3, __VA_ARGS__); break; \
    case 4: function(4, __VA_ARGS__); break; \
    case 5: function(5, __VA_ARGS__); break; \
    default: function(ROWS, __VA_ARGS__);    \
    }

INLINE void multiply_rows(int rows, int vectors, const uint32_t *a, int64_t a_stride, const uint32_t *b,
                          int64_t b_stride, int depth, float *c, int64_t c_stride, enum words words) {
    BY_ROWS(rows, multiply, vectors, a, a_stride, b, b_stride, depth, c, c_stride, words);
}
