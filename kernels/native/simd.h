/* Vectors of HR_LANES floats: 16 with AVX-512 VNNI, 8 with AVX2 (with or without AVX-VNNI), and the compiler's own vectors (8, or HR_LANES if given) where
 * HR_PORTABLE is defined or the processor has neither. Arithmetic is written with the compiler's vector operators; only what they
 * cannot say is an intrinsic here. Products and sums are fused only where vf_fma says so (the build forbids other contraction), so
 * a row's arithmetic is the same in every tile shape. */
#ifndef HEADRACE_SIMD_H
#define HEADRACE_SIMD_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#include "headrace.h"

#if !defined(HR_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define HR_AVX512 1
#define HR_LANES 16
#elif !defined(HR_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HR_AVX2 1
#define HR_LANES 8
#elif !defined(HR_LANES)
#define HR_LANES 8
#endif
#if defined(HR_AVX512) || defined(HR_AVX2)
#include <immintrin.h>
#endif

/* Keeps a vector in a register from here on: without it the compiler gathers the integer sums of a block in an order of its own and
 * spills most of them. */
#if defined(HR_AVX512)
#define HR_PIN(v) __asm__("" : "+v"(v))
#elif defined(HR_AVX2)
#define HR_PIN(v) __asm__("" : "+x"(v))
#else
#define HR_PIN(v) ((void)(v))
#endif

typedef float vf __attribute__((vector_size(4 * HR_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * HR_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * HR_LANES)));
typedef uint8_t vb __attribute__((vector_size(4 * HR_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * HR_LANES)));

HR_INLINE vf vf_set(float x) { return x - (vf){0}; }
HR_INLINE vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
HR_INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
HR_INLINE vb vb_load(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return v; }
HR_INLINE vf vf_pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
HR_INLINE vf vf_float(vi x) { return __builtin_convertvector(x, vf); }

HR_INLINE vf vf_fma(vf a, vf b, vf c) {
#if defined(HR_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(HR_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

HR_INLINE vf vf_max(vf a, vf b) {
#if defined(HR_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(HR_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_pick(a > b, a, b);
#endif
}

HR_INLINE vf vf_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* Sum of the lanes, always in the same order: halves, quarters, … */
HR_INLINE float vf_sum(vf v) {
    float lane[HR_LANES];
    vf_store(lane, v);
    for (int half = HR_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

HR_INLINE float vf_largest(vf v) {
    float lane[HR_LANES], most;
    vf_store(lane, v);
    most = lane[0];
    for (int i = 1; i < HR_LANES; i++) most = lane[i] > most ? lane[i] : most;
    return most;
}

HR_INLINE vf vf_iota(void) {
    vf v;
    for (int i = 0; i < HR_LANES; i++) v[i] = (float)i;
    return v;
}

/* ---- 16-bit floats ---- */
HR_INLINE float hr_from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 5.9604644775390625e-8f; /* 2^-24 */
        memcpy(&bits, &value, 4);
    } else {
        bits = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

HR_INLINE uint16_t hr_to_half(float x) { /* to nearest, ties to even */
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* subnormal: adding 0.5 leaves the rounded fraction in the low bits */
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits - 0x38000000) >> 13));
}

HR_INLINE float hr_from_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

HR_INLINE uint16_t hr_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

HR_INLINE vf vf_load_half(const uint16_t *p) {
#if defined(HR_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(HR_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf v;
    for (int i = 0; i < HR_LANES; i++) v[i] = hr_from_half(p[i]);
    return v;
#endif
}

HR_INLINE vf vf_load_bf16(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

/* ---- e4m3, 8-bit floats without infinities: their bits in those of a half are the value over 256 ---- */
HR_INLINE float hr_from_e4m3(uint8_t b) {
    return hr_from_half((uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f;
}

HR_INLINE uint8_t hr_to_e4m3(float x) { /* to nearest, ties to even, at most 448 */
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    if (bits > 0x43e00000) bits = 0x43e00000;
    if (bits < 0x3c800000) { /* below 2^-6 the step is 2^-9, the last place of 2^14: adding that rounds to it */
        float small;
        memcpy(&small, &bits, 4);
        small += 16384.0f;
        memcpy(&bits, &small, 4);
        return (uint8_t)(sign | (bits - 0x46800000));
    }
    return (uint8_t)(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)));
}

#if defined(HR_AVX512) || defined(HR_AVX2)
HR_INLINE __m256 hr_load8_e4m3(const uint8_t *p) { /* eight, whatever the lanes of vf */
    __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    w = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x80)), 8),
                     _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x7f)), 7));
    return _mm256_mul_ps(_mm256_cvtph_ps(w), _mm256_set1_ps(256.0f));
}
#endif

#if !defined(HR_AVX512) && !defined(HR_AVX2)
/* Not inlined: lane by lane it is so much code that compilers take half a minute for a file with it in its loops. */
__attribute__((noinline, unused)) static vf hr_lanes_of_e4m3(const uint8_t *p) {
    vf v;
    for (int i = 0; i < HR_LANES; i++) v[i] = hr_from_e4m3(p[i]);
    return v;
}
#endif

HR_INLINE vf vf_load_e4m3(const uint8_t *p) {
#if defined(HR_AVX512)
    __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    w = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8),
                        _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7f)), 7));
    return (vf)_mm512_cvtph_ps(w) * 256.0f;
#elif defined(HR_AVX2)
    return (vf)hr_load8_e4m3(p);
#else
    return hr_lanes_of_e4m3(p);
#endif
}

HR_INLINE void vf_store_half(uint16_t *p, vf v) {
#if defined(HR_AVX512)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(HR_AVX2)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < HR_LANES; i++) p[i] = hr_to_half(v[i]);
#endif
}

/* Elements of any float kind, vector by vector and then one by one. */
HR_INLINE vf vf_load_kind(const void *p, int64_t index, int kind) {
    if (kind == HR_F32) return vf_load((const float *)p + index);
    if (kind == HR_BF16) return vf_load_bf16((const uint16_t *)p + index);
    if (kind == HR_E4M3) return vf_load_e4m3((const uint8_t *)p + index);
    return vf_load_half((const uint16_t *)p + index);
}

HR_INLINE float hr_load_kind(const void *p, int64_t index, int kind) {
    if (kind == HR_F32) return ((const float *)p)[index];
    if (kind == HR_E4M3) return hr_from_e4m3(((const uint8_t *)p)[index]);
    uint16_t h = ((const uint16_t *)p)[index];
    return kind == HR_BF16 ? hr_from_bf16(h) : hr_from_half(h);
}

HR_INLINE int64_t hr_kind_bytes(int kind) { return kind == HR_F32 ? 4 : kind == HR_E4M3 ? 1 : 2; }

/* ---- e^x, error about 1 unit in the last place; exactly 1 at 0; 0 below -87 and infinite above 88. Range reduction and polynomial after Cephes' expf. ---- */
HR_INLINE vf vf_exp(vf x) {
    const float magic = 12582912.0f; /* 1.5 · 2^23: adding it leaves the nearest integer in the low bits */
    vi huge = x > 88.0f, tiny = x < -87.0f;
    x = vf_pick(huge, vf_set(88.0f), x);
    x = vf_pick(tiny, vf_set(-87.0f), x);
    vf shifted = vf_fma(x, vf_set(1.44269504088896341f), vf_set(magic));
    vf n = shifted - magic;
    vi power = ((vi)shifted - (vi)vf_set(magic) + 127) << 23;
    vf r = vf_fma(n, vf_set(-0.693359375f), x);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_fma(vf_set(1.9875691500e-4f), r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_fma(p, r * r, r) + 1.0f;
    p = vf_pick(huge, vf_set(__builtin_inff()), p * (vf)power);
    return vf_pick(tiny, vf_set(0.0f), p);
}

/* ---- integer dot products: 4 bytes per lane ---- */
HR_INLINE vb vb_spread(const int8_t *p) { /* the same 4 bytes in every lane */
    int32_t four;
    memcpy(&four, p, 4);
    return (vb)(four - (vi){0});
}

/* Sums of unsigned 4-bit weights times int8 over at most one block of 32 fit a dot_nibble; dot_nibble_end widens to int32. */
#if defined(HR_AVX512) || (defined(HR_AVX2) && defined(__AVXVNNI__))
#define HR_VNNI 1
typedef vi dot_nibble;
HR_INLINE dot_nibble dot_nibble_add(dot_nibble acc, vb w, vb a) {
#if defined(HR_AVX512)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)a);
#endif
}
HR_INLINE vi dot_nibble_end(dot_nibble acc) { return acc; }
#elif defined(HR_AVX2)
typedef int16_t dot_nibble __attribute__((vector_size(4 * HR_LANES)));
HR_INLINE dot_nibble dot_nibble_add(dot_nibble acc, vb w, vb a) { /* 16 products of at most 15 · 127: within int16 */
    return acc + (dot_nibble)_mm256_maddubs_epi16((__m256i)w, (__m256i)a);
}
HR_INLINE vi dot_nibble_end(dot_nibble acc) { return (vi)_mm256_madd_epi16((__m256i)acc, _mm256_set1_epi16(1)); }
#else
typedef vi dot_nibble;
/* Not inlined: without instructions for it this is a page of code. */
static __attribute__((noinline, unused)) void dot_portable(int32_t *acc, const uint8_t *w, const int8_t *a, int is_signed) {
    for (int i = 0; i < 4 * HR_LANES; i++) acc[i / 4] += (is_signed ? (int8_t)w[i] : w[i]) * a[i];
}
HR_INLINE vi dot_by_memory(vi acc, vb w, vb a, int is_signed) {
    int32_t sums[HR_LANES];
    uint8_t left[4 * HR_LANES];
    int8_t right[4 * HR_LANES];
    memcpy(sums, &acc, sizeof acc);
    memcpy(left, &w, sizeof w);
    memcpy(right, &a, sizeof a);
    dot_portable(sums, left, right, is_signed);
    memcpy(&acc, sums, sizeof acc);
    return acc;
}
HR_INLINE dot_nibble dot_nibble_add(dot_nibble acc, vb w, vb a) { return dot_by_memory(acc, w, a, 0); }
HR_INLINE vi dot_nibble_end(dot_nibble acc) { return acc; }
#endif

/* 8-bit weights are stored plus HR_BYTE_OFFSET: VNNI multiplies unsigned by signed, the others take them signed. */
#if defined(HR_VNNI)
enum { HR_BYTE_OFFSET = 128 };
HR_INLINE vi dot_byte_add(vi acc, vb w, vb a) { return dot_nibble_add(acc, w, a); }
#elif defined(HR_AVX2)
enum { HR_BYTE_OFFSET = 0 };
HR_INLINE vi dot_byte_add(vi acc, vb w, vb a) { /* |w| · (a with w's sign): pairs are at most 2 · 128 · 127, within int16 */
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)a, (__m256i)w));
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
enum { HR_BYTE_OFFSET = 0 };
HR_INLINE vi dot_byte_add(vi acc, vb w, vb a) { return dot_by_memory(acc, w, a, 1); }
#endif

#endif
