/* Matrices in GGUF's block formats, multiplied packed.
 *
 * Layout: panels of HR_LANES rows (padded with zero rows to a multiple of PANELS panels), blocks of 32 inputs one after the other in a panel. A block
 * of a panel holds the rows' scales d as fp16, for q4_1 their minima m as fp16, then the weights so that lane r of a vector holds
 * 4 consecutive inputs of row r: eight vectors of bytes for q8_0; four for the 4-bit formats, where vector j carries inputs
 * 4j .. 4j+3 in the low nibbles and 16+4j .. 16+4j+3 in the high ones.
 *
 * Activations are quantised per token and block of 32 to one or two planes of int8 with a float scale: one as in llama.cpp's Q8_1;
 * with two, the second holds what rounding left of the first in steps 256 times finer, together about 16 bits, which leaves
 * nothing of the quantisation to be seen in a model's output. A block's dot product is exact in integers; blocks are added in
 * float32 in order of K, one chain per output, whatever the number of tokens. */
#include "headrace.h"
#include "simd.h"

#define L HR_LANES
#if defined(HR_AVX512) || defined(HR_AVX2)
enum { PANELS = 2, TILE = 4, TOKEN_BLOCK = 16 };
#else
enum { PANELS = 1, TILE = 2, TOKEN_BLOCK = 16 };
#endif

HR_INLINE int is_packed4(int kind) { return kind != HR_Q8_0; }
HR_INLINE int header_bytes(int kind) { return kind == HR_Q4_1 ? 4 * L : 2 * L; }
HR_INLINE int block_bytes(int kind) { return header_bytes(kind) + L * (is_packed4(kind) ? 16 : 32); }
HR_INLINE int source_bytes(int kind) { return kind == HR_Q4_0 ? 18 : kind == HR_Q4_1 ? 20 : 34; }

HR_INLINE int64_t groups(int64_t rows) { return (rows + L * PANELS - 1) / (L * PANELS); }

int64_t hr_quant_bytes(int kind, int64_t rows, int64_t in) { return groups(rows) * PANELS * (in / HR_BLOCK) * block_bytes(kind); }

void hr_quant_pack(int kind, int64_t rows, int64_t in, const uint8_t *source, uint8_t *packed) {
    int64_t blocks = in / HR_BLOCK, stride = blocks * source_bytes(kind);
    memset(packed, 0, (size_t)hr_quant_bytes(kind, rows, in));
    for (int64_t row = 0; row < rows; row++) {
        int lane = (int)(row % L);
        for (int64_t b = 0; b < blocks; b++) {
            const uint8_t *from = source + row * stride + b * source_bytes(kind);
            uint8_t *to = packed + (row / L * blocks + b) * block_bytes(kind);
            memcpy(to + 2 * lane, from, 2);
            if (kind == HR_Q4_1) memcpy(to + 2 * L + 2 * lane, from + 2, 2);
            from += kind == HR_Q4_1 ? 4 : 2;
            to += header_bytes(kind) + 4 * lane;
            for (int i = 0; i < (is_packed4(kind) ? 16 : 32); i++)
                to[i / 4 * 4 * L + i % 4] = is_packed4(kind) ? from[i] : (uint8_t)(from[i] + HR_BYTE_OFFSET);
        }
    }
}

void hr_quant_row(const hr_segment *segment, int64_t in, int64_t row, float *out) {
    int kind = segment->kind, lane = (int)(row % L);
    const uint8_t *block = segment->data + row / L * (in / HR_BLOCK) * block_bytes(kind);
    for (int64_t b = 0; b < in / HR_BLOCK; b++, block += block_bytes(kind), out += HR_BLOCK) {
        uint16_t d, m = 0;
        memcpy(&d, block + 2 * lane, 2);
        if (kind == HR_Q4_1) memcpy(&m, block + 2 * L + 2 * lane, 2);
        float scale = hr_from_half(d), least = hr_from_half(m);
        const uint8_t *q = block + header_bytes(kind) + 4 * lane;
        for (int i = 0; i < HR_BLOCK; i++) {
            uint8_t byte = q[(is_packed4(kind) ? i % 16 : i) / 4 * 4 * L + i % 4];
            if (kind == HR_Q8_0) out[i] = (float)(int8_t)(byte - HR_BYTE_OFFSET) * scale;
            else if (kind == HR_Q4_0) out[i] = (float)((i < 16 ? byte & 15 : byte >> 4) - 8) * scale;
            else out[i] = (float)(i < 16 ? byte & 15 : byte >> 4) * scale + least;
        }
    }
}

/* ---- activations ---- */
typedef int8_t narrow __attribute__((vector_size(L)));

typedef struct {
    const float *x;
    int64_t in;
    int planes;
    int8_t *q;
    float *scale, *sum;
} quantize_job;

/* Adding 1.5 · 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits. */
HR_INLINE vi vi_nearest(vf x) { return (vi)(x + 12582912.0f) - 0x4b400000; }

HR_INLINE void store_narrow(int8_t *to, vi x) {
    narrow bytes = __builtin_convertvector(x, narrow);
    memcpy(to, &bytes, sizeof bytes);
}

static void quantize_rows(void *argument, int64_t begin, int64_t end, int thread) {
    const quantize_job *job = argument;
    int64_t blocks = job->in / HR_BLOCK;
    (void)thread;
    for (int64_t i = begin * blocks; i < end * blocks; i++) {
        const float *x = job->x + i * HR_BLOCK;
        int8_t *q = job->q + i * HR_BLOCK * job->planes;
        vf most = vf_abs(vf_load(x));
        for (int k = L; k < HR_BLOCK; k += L) most = vf_max(most, vf_abs(vf_load(x + k)));
        float largest = vf_largest(most), inverse = largest > 1e-30f ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
        vi total = {0};
        for (int k = 0; k < HR_BLOCK; k += L) {
            vf scaled = vf_load(x + k) * inverse;
            vi first = vi_nearest(scaled);
            store_narrow(q + k, first);
            if (job->planes == 1) {
                total += first;
                continue;
            }
            /* -128 .. 128, of which symmetric int8 has no room for the ends */
            vf left = vf_max((scaled - vf_float(first)) * 256.0f, vf_set(-127.0f));
            vi rest = vi_nearest(-vf_max(-left, vf_set(-127.0f)));
            store_narrow(q + HR_BLOCK + k, rest);
            total += (first << 8) + rest;
        }
        if (job->planes == 2) scale /= 256.0f;
        job->scale[i] = scale;
        job->sum[i] = scale * vf_sum(vf_float(total));
    }
}

int hr_quantize(hr_pool *pool, const float *x, int64_t tokens, int64_t in, int planes, hr_quantized *out) {
    int64_t blocks = tokens * (in / HR_BLOCK);
    int8_t *q = hr_shared(pool, HR_SHARED_ACTIVATIONS, (size_t)(blocks * (HR_BLOCK * planes + 8)));
    if (!q) return HR_NO_MEMORY;
    float *scale = (float *)(q + blocks * HR_BLOCK * planes);
    quantize_job job = {x, in, planes, q, scale, scale + blocks};
    int64_t grain = 65536 / in + 1; /* about 10 us of work; fewer rows are not worth waking anybody */
    hr_parallel(pool, tokens, grain, quantize_rows, &job);
    *out = (hr_quantized){q, job.scale, job.sum, planes};
    return HR_OK;
}

/* ---- the product ---- */
typedef struct {
    const hr_segment *segment;
    int64_t in, tokens, stride;
    const hr_quantized *x;
    const float *bias;
    float *out;
} product_job;

/* The exact sums of one block: PANELS panels × `nt` tokens of one plane of activations, `a` and then every `stride` bytes. */
HR_INLINE void block_sums(vi total[PANELS][TILE], const uint8_t *weights, int64_t panel_bytes, const int8_t *a, int64_t stride, int kind,
                          int nt) {
    if (is_packed4(kind)) {
        dot_nibble part[PANELS][TILE] = {{{0}}};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vb low[PANELS], high[PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) {
                vb both = vb_load(weights + p * panel_bytes + j * 4 * L);
                low[p] = both & 15;
                high[p] = (vb)((vu)both >> 4) & 15;
            }
#pragma GCC unroll 4
            for (int t = 0; t < nt; t++) {
                vb x = vb_spread(a + t * stride + 4 * j), y = vb_spread(a + t * stride + 16 + 4 * j);
#pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++) {
                    part[p][t] = dot_nibble_add(part[p][t], low[p], x);
                    part[p][t] = dot_nibble_add(part[p][t], high[p], y);
                    HR_PIN(part[p][t]);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < PANELS * nt; i++) total[i / nt][i % nt] = dot_nibble_end(part[i / nt][i % nt]);
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < PANELS * nt; i++) total[i / nt][i % nt] = (vi){0};
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            vb w[PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) w[p] = vb_load(weights + p * panel_bytes + j * 4 * L);
#pragma GCC unroll 4
            for (int t = 0; t < nt; t++) {
                vb x = vb_spread(a + t * stride + 4 * j);
#pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++) {
                    total[p][t] = dot_byte_add(total[p][t], w[p], x);
                    HR_PIN(total[p][t]);
                }
            }
        }
    }
}

/* PANELS panels beside each other × `nt` tokens, from token `first`, row `row`. kind, nt and planes are constants after inlining: a
 * spread activation serves all the panels, an unpacked weight nt tokens. */
HR_INLINE void tile(const product_job *job, const uint8_t *panel, int64_t first, int64_t row, int kind, int nt, int planes) {
    int64_t blocks = job->in / HR_BLOCK, panel_bytes = blocks * block_bytes(kind), stride = job->in * planes;
    const int8_t *a = job->x->q + first * stride;
    const float *scale = job->x->scale + first * blocks, *sum = job->x->sum + first * blocks;
    vf acc[PANELS][TILE] = {{{0}}};
    for (int64_t b = 0; b < blocks; b++, panel += block_bytes(kind), a += HR_BLOCK * planes) {
        vi total[PANELS][TILE];
        block_sums(total, panel + header_bytes(kind), panel_bytes, a, stride, kind, nt);
        if (planes == 2) {
            vi rest[PANELS][TILE];
            block_sums(rest, panel + header_bytes(kind), panel_bytes, a + HR_BLOCK, stride, kind, nt);
#pragma GCC unroll 8
            for (int i = 0; i < PANELS * nt; i++) total[i / nt][i % nt] = (total[i / nt][i % nt] << 8) + rest[i / nt][i % nt];
        }
        const float offset = kind == HR_Q4_0 ? 8.0f : kind == HR_Q8_0 ? (float)HR_BYTE_OFFSET : 0.0f;
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            const uint16_t *header = (const uint16_t *)(panel + p * panel_bytes);
            vf d = vf_load_half(header), m = kind == HR_Q4_1 ? vf_load_half(header + L) : d * -offset;
#pragma GCC unroll 4
            for (int t = 0; t < nt; t++) {
                acc[p][t] = vf_fma(vf_float(total[p][t]), d * scale[t * blocks + b], acc[p][t]);
                if (kind == HR_Q4_1 || offset != 0.0f) acc[p][t] = vf_fma(m, vf_set(sum[t * blocks + b]), acc[p][t]);
            }
        }
    }
    for (int p = 0; p < PANELS; p++, row += L) {
        int64_t valid = job->segment->rows - row;
        for (int t = 0; t < nt; t++) {
            float *out = job->out + (first + t) * job->stride + row;
            if (valid >= L) {
                vf_store(out, job->bias ? acc[p][t] + vf_load(job->bias + row) : acc[p][t]);
            } else {
                for (int i = 0; i < valid; i++) out[i] = acc[p][t][i] + (job->bias ? job->bias[row + i] : 0.0f);
            }
        }
    }
}

HR_INLINE void run_planes(const product_job *job, int64_t begin, int64_t end, int kind, int planes) {
    int64_t bytes = PANELS * job->in / HR_BLOCK * block_bytes(kind);
    for (int64_t block = 0; block < job->tokens; block += TOKEN_BLOCK) {
        int64_t last = block + TOKEN_BLOCK < job->tokens ? block + TOKEN_BLOCK : job->tokens;
        for (int64_t g = begin; g < end; g++) {
            const uint8_t *panel = job->segment->data + g * bytes;
            int64_t t = block, row = g * PANELS * L;
            for (; t + TILE <= last; t += TILE) tile(job, panel, t, row, kind, TILE, planes);
            if (TILE > 3 && last - t == 3) tile(job, panel, t, row, kind, 3, planes);
            if (TILE > 2 && last - t == 2) tile(job, panel, t, row, kind, 2, planes);
            if (last - t == 1) tile(job, panel, t, row, kind, 1, planes);
        }
    }
}

HR_INLINE void run_groups(const product_job *job, int64_t begin, int64_t end, int kind) {
    if (job->x->planes == 2) run_planes(job, begin, end, kind, 2);
    else run_planes(job, begin, end, kind, 1);
}

static void groups_q4_0(void *job, int64_t begin, int64_t end, int thread) { (void)thread; run_groups(job, begin, end, HR_Q4_0); }
static void groups_q4_1(void *job, int64_t begin, int64_t end, int thread) { (void)thread; run_groups(job, begin, end, HR_Q4_1); }
static void groups_q8_0(void *job, int64_t begin, int64_t end, int thread) { (void)thread; run_groups(job, begin, end, HR_Q8_0); }

void hr_quant_linear(hr_pool *pool, const hr_segment *segment, int64_t in, const hr_quantized *x, int64_t tokens,
                     const float *bias, float *out, int64_t stride) {
    product_job job = {segment, in, tokens, stride, x, bias, out};
    int64_t count = groups(segment->rows), grain = count / (4 * hr_threads(pool)) + 1;
    hr_range run = segment->kind == HR_Q4_0 ? groups_q4_0 : segment->kind == HR_Q4_1 ? groups_q4_1 : groups_q8_0;
    hr_parallel(pool, count, grain, run, &job);
}
