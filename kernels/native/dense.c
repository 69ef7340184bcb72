/* Matrices of float32, bfloat16 or float16 against float32 activations.
 *
 * Layout: panels of two vectors of rows (the last one padded with zero rows); in a panel, input after input, so that one input's
 * weights of all its rows lie together. Few tokens convert 16-bit weights as they stream by; many tokens convert a panel once. */
#include "headrace.h"
#include "microkernel.h"

#define W HR_WIDE

int64_t hr_dense_bytes(int kind, int64_t rows, int64_t in) { return (rows + W - 1) / W * W * in * hr_kind_bytes(kind); }

HR_INLINE void interleave(int64_t rows, int64_t in, const uint8_t *source, uint8_t *packed, size_t size) {
    for (int64_t row = 0; row < rows; row++) {
        uint8_t *to = packed + (size_t)(row / W * W * in + row % W) * size;
        for (int64_t k = 0; k < in; k++) memcpy(to + (size_t)(k * W) * size, source + (size_t)(row * in + k) * size, size);
    }
}

void hr_dense_pack(int kind, int64_t rows, int64_t in, const uint8_t *source, uint8_t *packed) {
    memset(packed, 0, (size_t)hr_dense_bytes(kind, rows, in));
    if (kind == HR_F32) interleave(rows, in, source, packed, 4);
    else interleave(rows, in, source, packed, 2);
}

void hr_dense_row(const hr_segment *segment, int64_t in, int64_t row, float *out) {
    int64_t first = row / W * W * in + row % W;
    for (int64_t k = 0; k < in; k++) out[k] = hr_load_kind(segment->data, first + k * W, segment->kind);
}

typedef struct {
    hr_pool *pool;
    const hr_segment *segment;
    int64_t in, tokens, stride;
    const float *x, *bias;
    float *out;
    int convert;
} product_job;

HR_INLINE void panels(const product_job *job, int64_t begin, int64_t end, int thread, int kind) {
    float edge_bias[W], *panel32 = NULL, *edge = NULL;
    int64_t in = job->in, tokens = job->tokens;
    /* The caller made sure of the memory before the run. */
    panel32 = hr_scratch(job->pool, thread, sizeof(float) * (size_t)(W * (in + HR_TALL)));
    edge = panel32 + W * in;
    for (int64_t p = begin; p < end; p++) {
        int64_t row = p * W, valid = job->segment->rows - row;
        const void *panel = job->segment->data + p * W * in * hr_kind_bytes(kind);
        const float *bias = job->bias ? job->bias + row : NULL;
        if (valid < W && bias) {
            for (int i = 0; i < W; i++) edge_bias[i] = i < valid ? bias[i] : 0.0f;
            bias = edge_bias;
        }
        int converted = kind != HR_F32 && job->convert;
        if (converted)
            for (int64_t i = 0; i < W * in; i += HR_LANES) vf_store(panel32 + i, vf_load_kind(panel, i, kind));
        for (int64_t t = 0; t < tokens; t += HR_TALL) {
            int64_t count = tokens - t < HR_TALL ? tokens - t : HR_TALL, stride = valid >= W ? job->stride : W;
            const float *x = job->x + t * in;
            float *out = job->out + t * job->stride + row, *c = valid >= W ? out : edge;
            if (converted) hr_tiles(count, x, in, panel32, W, HR_F32, in, 0, bias, c, stride);
            else hr_tiles(count, x, in, panel, W, kind, in, 0, bias, c, stride);
            if (valid < W)
                for (int64_t i = 0; i < count; i++) memcpy(out + i * job->stride, edge + i * W, sizeof(float) * (size_t)valid);
        }
    }
}

static void panels_f32(void *job, int64_t begin, int64_t end, int thread) { panels(job, begin, end, thread, HR_F32); }
static void panels_bf16(void *job, int64_t begin, int64_t end, int thread) { panels(job, begin, end, thread, HR_BF16); }
static void panels_f16(void *job, int64_t begin, int64_t end, int thread) { panels(job, begin, end, thread, HR_F16); }

int hr_dense_linear(hr_pool *pool, const hr_segment *segment, int64_t in, const float *x, int64_t tokens, const float *bias, float *out,
                    int64_t stride) {
    product_job job = {pool, segment, in, tokens, stride, x, bias, out, tokens > HR_TALL};
    int64_t count = (segment->rows + W - 1) / W, grain = count / (4 * hr_threads(pool)) + 1;
    for (int i = 0; i < hr_threads(pool); i++)
        if (!hr_scratch(pool, i, sizeof(float) * (size_t)(W * (in + HR_TALL)))) return HR_NO_MEMORY;
    hr_parallel(pool, count, grain, segment->kind == HR_F32 ? panels_f32 : segment->kind == HR_BF16 ? panels_bf16 : panels_f16, &job);
    return HR_OK;
}
