/* Operations on rows that stand by themselves: RMSNorm, gated activation, rotary embedding with the write to the KV cache. */
#include <math.h>

#include "headrace.h"
#include "simd.h"

enum { SMALL = 16384 /* elements that one thread handles sooner than it wakes another */ };

static int64_t grain_for(int64_t width) { return SMALL / (width > 0 ? width : 1) + 1; }

/* ---- RMSNorm ---- */
typedef struct {
    const float *x, *weight;
    float *residual, *out;
    int64_t width;
    float eps;
} norm_job;

/* Sums of squares in HR_LANES chains and a tail: the same order for every row. */
static float inverse_rms(const float *x, int64_t width, float eps) {
    vf squares = {0};
    int64_t k = 0;
    for (; k + HR_LANES <= width; k += HR_LANES) squares = vf_fma(vf_load(x + k), vf_load(x + k), squares);
    float sum = vf_sum(squares);
    for (; k < width; k++) sum += x[k] * x[k];
    return 1.0f / sqrtf(sum / (float)width + eps);
}

static void norm_rows(void *argument, int64_t begin, int64_t end, int thread) {
    const norm_job *job = argument;
    int64_t width = job->width;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        const float *x = job->x + row * width;
        float *out = job->out + row * width;
        if (job->residual) {
            float *sum = job->residual + row * width;
            for (int64_t k = 0; k < width; k++) sum[k] += x[k];
            x = sum;
        }
        float scale = inverse_rms(x, width, job->eps);
        for (int64_t k = 0; k < width; k++) out[k] = x[k] * scale * job->weight[k];
    }
}

/* residual NULL or [rows, width], to which x is added first. */
HR_API int hr_rms_norm(hr_pool *pool, const float *x, float *residual, const float *weight, int64_t rows, int64_t width, float eps,
                       float *out) {
    norm_job job = {x, weight, residual, out, width, eps};
    hr_parallel(pool, rows, grain_for(width), norm_rows, &job);
    return HR_OK;
}

/* ---- gated activation ---- */
typedef struct {
    const float *x;
    float *out;
    int64_t width;
    int kind;
} gated_job;

HR_INLINE vf activate(vf x, vf up, int kind) {
    if (kind == HR_SILU) return x / (1.0f + vf_exp(-x)) * up;
    if (kind == HR_CLAMPED_SILU) {
        x = -vf_max(-x, vf_set(-7.0f));
        up = vf_max(-vf_max(-up, vf_set(-7.0f)), vf_set(-7.0f)) + 1.0f;
        return x / (1.0f + vf_exp(-1.702f * x)) * up;
    }
    /* 0.5 x (1 + tanh u) = x / (1 + e^(−2u)) */
    vf u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + vf_exp(-2.0f * u)) * up;
}

static void gated_rows(void *argument, int64_t begin, int64_t end, int thread) {
    const gated_job *job = argument;
    int64_t width = job->width;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        const float *gate = job->x + 2 * row * width, *up = gate + width;
        float *out = job->out + row * width;
        int64_t k = 0;
        for (; k + HR_LANES <= width; k += HR_LANES) vf_store(out + k, activate(vf_load(gate + k), vf_load(up + k), job->kind));
        if (k < width) {
            float rest[HR_LANES] = {0}, rest_up[HR_LANES] = {0};
            memcpy(rest, gate + k, sizeof(float) * (size_t)(width - k));
            memcpy(rest_up, up + k, sizeof(float) * (size_t)(width - k));
            vf_store(rest, activate(vf_load(rest), vf_load(rest_up), job->kind));
            memcpy(out + k, rest, sizeof(float) * (size_t)(width - k));
        }
    }
}

/* x [rows, 2 · width] → out [rows, width]; kind: of hr_activation */
HR_API int hr_gated(hr_pool *pool, const float *x, int64_t rows, int64_t width, int kind, float *out) {
    gated_job job = {x, out, width, kind};
    hr_parallel(pool, rows, grain_for(4 * width), gated_rows, &job);
    return HR_OK;
}

/* ---- rotary embedding and the KV cache ---- */
HR_INLINE void store_kind(void *cache, int64_t index, const float *x, int64_t count, int kind) {
    if (kind == HR_F32) {
        memcpy((float *)cache + index, x, sizeof(float) * (size_t)count);
    } else if (kind == HR_E4M3) {
        for (int64_t k = 0; k < count; k++) ((uint8_t *)cache)[index + k] = hr_to_e4m3(x[k]);
    } else {
        uint16_t *to = (uint16_t *)cache + index;
        int64_t k = 0;
        if (kind == HR_F16)
            for (; k + HR_LANES <= count; k += HR_LANES) vf_store_half(to + k, vf_load(x + k));
        for (; k < count; k++) to[k] = kind == HR_F16 ? hr_to_half(x[k]) : hr_to_bf16(x[k]);
    }
}

/* x and out [D], out may not be x; norm NULL or [D] */
HR_INLINE void rotate(const float *x, const float *cos_sin, const float *norm, float eps, int64_t D, float *normed, float *out) {
    int64_t half = D / 2;
    if (norm) {
        float scale = inverse_rms(x, D, eps);
        for (int64_t i = 0; i < D; i++) normed[i] = x[i] * scale * norm[i];
        x = normed;
    }
    const float *cosine = cos_sin, *sine = cos_sin + half;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        out[i] = a * cosine[i] - b * sine[i];
        out[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void rope_rows(void *argument, int64_t begin, int64_t end, int thread) {
    const hr_rope_args *job = argument;
    int64_t D = job->head_dim, Hq = job->q_heads, Hkv = job->kv_heads, page = job->page_size;
    float normed[HR_MAX_HEAD], rotated[HR_MAX_HEAD];
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        const float *row = job->qkv + t * (Hq + (job->values == job->keys ? 1 : 2) * Hkv) * D, *angles = job->cos_sin + job->positions[t] * D;
        for (int64_t h = 0; h < Hq; h++)
            rotate(row + h * D, angles, job->q_norm, job->eps, D, normed, job->q + (t * Hq + h) * D);
        for (int64_t h = 0; h < Hkv; h++) {
            int64_t slot = job->slots[t], at = ((slot / page * Hkv + h) * page + slot % page) * D;
            rotate(row + (Hq + h) * D, angles, job->k_norm, job->eps, D, normed, rotated);
            store_kind(job->keys, at, rotated, D, job->kv_kind);
            if (job->values != job->keys) store_kind(job->values, at, row + (Hq + Hkv + h) * D, D, job->kv_kind);
        }
    }
}

int hr_rope_check(const hr_rope_args *args) {
    for (int64_t t = 0; t < args->tokens; t++) {
        if (args->positions[t] < 0 || args->positions[t] >= args->max_positions) return HR_BAD_POSITION;
        if (args->slots[t] < 0 || args->slots[t] >= args->num_slots) return HR_BAD_SLOT;
    }
    return HR_OK;
}

HR_API int hr_rope_cache(hr_pool *pool, const hr_rope_args *args) {
    int error = hr_rope_check(args);
    if (error) return error;
    hr_parallel(pool, args->tokens, grain_for((args->q_heads + 2 * args->kv_heads) * (int64_t)args->head_dim), rope_rows, (void *)args);
    return HR_OK;
}
