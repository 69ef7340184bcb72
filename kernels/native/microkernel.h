/* C [nt, 2 vectors] (+)= A [nt, K] · B [K, 2 vectors]: the inner loop of dense products and of attention. One chain of fused
 * multiply-adds per output, in order of k, whatever nt is. */
#ifndef HEADRACE_MICROKERNEL_H
#define HEADRACE_MICROKERNEL_H

#include "simd.h"

enum { HR_WIDE = 2 * HR_LANES, HR_TALL = 6 };

/* nt rows × nv vectors, nt · nv ≤ 2 · HR_TALL; nt, nv, kind and add are constants after inlining; bias is NULL or one float per
 * column; strides in elements. */
HR_INLINE void hr_tile(int nt, int nv, const float *a, int64_t a_stride, const void *b, int64_t b_stride, int kind, int64_t K, int add,
                       const float *bias, float *c, int64_t c_stride) {
    vf acc[2 * HR_TALL];
#pragma GCC unroll 12
    for (int i = 0; i < nt * nv; i++) acc[i] = add ? vf_load(c + i / nv * c_stride + i % nv * HR_LANES) : (vf){0};
    for (int64_t k = 0; k < K; k++) {
        vf right[4];
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) right[v] = vf_load_kind(b, k * b_stride + v * HR_LANES, kind);
#pragma GCC unroll 12
        for (int i = 0; i < nt * nv; i++) acc[i] = vf_fma(vf_set(a[i / nv * a_stride + k]), right[i % nv], acc[i]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < nt * nv; i++) {
        if (bias) acc[i] = acc[i] + vf_load(bias + i % nv * HR_LANES);
        vf_store(c + i / nv * c_stride + i % nv * HR_LANES, acc[i]);
    }
}

/* HR_WIDE columns of any number of rows. */
HR_INLINE void hr_tiles(int64_t rows, const float *a, int64_t a_stride, const void *b, int64_t b_stride, int kind, int64_t K, int add,
                        const float *bias, float *c, int64_t c_stride) {
    while (rows >= HR_TALL) {
        hr_tile(HR_TALL, 2, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride);
        a += HR_TALL * a_stride;
        c += HR_TALL * c_stride;
        rows -= HR_TALL;
    }
    switch (rows) {
    case 5: hr_tile(5, 2, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    case 4: hr_tile(4, 2, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    case 3: hr_tile(3, 2, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    case 2: hr_tile(2, 2, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    case 1: hr_tile(1, 2, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    default: break;
    }
}

/* Any number of float32 columns (a multiple of HR_WIDE). Few rows take two column groups at once: a chain of dependent sums waits
 * four cycles per step, so that it takes about eight chains to keep the multipliers busy. */
HR_INLINE void hr_product(int64_t rows, int64_t columns, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t K,
                          int add, float *c, int64_t c_stride) {
    while (columns) {
        int double_width = rows <= 3 && columns >= 2 * HR_WIDE;
        if (double_width && rows == 3) hr_tile(3, 4, a, a_stride, b, b_stride, HR_F32, K, add, NULL, c, c_stride);
        else if (double_width && rows == 2) hr_tile(2, 4, a, a_stride, b, b_stride, HR_F32, K, add, NULL, c, c_stride);
        else if (double_width && rows == 1) hr_tile(1, 4, a, a_stride, b, b_stride, HR_F32, K, add, NULL, c, c_stride);
        else hr_tiles(rows, a, a_stride, b, b_stride, HR_F32, K, add, NULL, c, c_stride);
        int64_t done = double_width ? 2 * HR_WIDE : HR_WIDE;
        b += done, c += done, columns -= done;
    }
}

#endif
