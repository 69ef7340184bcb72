/* C [nt, 2 vectors] (+)= A [nt, K] · B [K, 2 vectors]: the inner loop of dense products and of attention. One chain of fused
 * multiply-adds per output, in order of k, whatever nt is. */
#ifndef HEADRACE_MICROKERNEL_H
#define HEADRACE_MICROKERNEL_H

#include "simd.h"

enum { HR_WIDE = 2 * HR_LANES, HR_TALL = 6 };

/* nt ≤ HR_TALL, kind and add are constants after inlining; bias is NULL or [HR_WIDE]; strides in elements. */
HR_INLINE void hr_tile(int nt, const float *a, int64_t a_stride, const void *b, int64_t b_stride, int kind, int64_t K, int add,
                       const float *bias, float *c, int64_t c_stride) {
    vf left[HR_TALL], right[HR_TALL];
#pragma GCC unroll 6
    for (int t = 0; t < nt; t++) {
        left[t] = add ? vf_load(c + t * c_stride) : (vf){0};
        right[t] = add ? vf_load(c + t * c_stride + HR_LANES) : (vf){0};
    }
    for (int64_t k = 0; k < K; k++) {
        vf b0 = vf_load_kind(b, k * b_stride, kind), b1 = vf_load_kind(b, k * b_stride + HR_LANES, kind);
#pragma GCC unroll 6
        for (int t = 0; t < nt; t++) {
            vf x = vf_set(a[t * a_stride + k]);
            left[t] = vf_fma(x, b0, left[t]);
            right[t] = vf_fma(x, b1, right[t]);
        }
    }
#pragma GCC unroll 6
    for (int t = 0; t < nt; t++) {
        vf_store(c + t * c_stride, bias ? left[t] + vf_load(bias) : left[t]);
        vf_store(c + t * c_stride + HR_LANES, bias ? right[t] + vf_load(bias + HR_LANES) : right[t]);
    }
}

/* Any number of rows. */
HR_INLINE void hr_tiles(int64_t rows, const float *a, int64_t a_stride, const void *b, int64_t b_stride, int kind, int64_t K, int add,
                        const float *bias, float *c, int64_t c_stride) {
    while (rows >= HR_TALL) {
        hr_tile(HR_TALL, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride);
        a += HR_TALL * a_stride;
        c += HR_TALL * c_stride;
        rows -= HR_TALL;
    }
    switch (rows) {
    case 5: hr_tile(5, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    case 4: hr_tile(4, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    case 3: hr_tile(3, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    case 2: hr_tile(2, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    case 1: hr_tile(1, a, a_stride, b, b_stride, kind, K, add, bias, c, c_stride); break;
    default: break;
    }
}

#endif
