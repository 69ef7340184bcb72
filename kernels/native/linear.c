/* Weights made of segments of any kind: packing, the product, and rows of an embedding. */
#include "headrace.h"
#include "simd.h"

static int is_dense(int kind) { return kind <= HR_F16; }

HR_API int hr_lanes(void) { return HR_LANES; }

HR_API int64_t hr_packed_bytes(int kind, int64_t rows, int64_t in) {
    return is_dense(kind) ? hr_dense_bytes(kind, rows, in) : hr_quant_bytes(kind, rows, in);
}

HR_API void hr_pack(int kind, int64_t rows, int64_t in, const uint8_t *source, uint8_t *packed) {
    if (is_dense(kind)) hr_dense_pack(kind, rows, in, source, packed);
    else hr_quant_pack(kind, rows, in, source, packed);
}

/* x [tokens, in] → out [tokens, weight->out] */
HR_API int hr_linear(hr_pool *pool, const hr_weight *weight, const float *x, int64_t tokens, float *out) {
    hr_quantized quantized = {0};
    int64_t row = 0;
    if (!tokens) return HR_OK;
    for (int i = 0; i < weight->segments; i++) {
        const hr_segment *segment = &weight->segment[i];
        const float *bias = weight->bias ? weight->bias + row : NULL;
        int error = HR_OK;
        if (is_dense(segment->kind)) {
            error = hr_dense_linear(pool, segment, weight->in, x, tokens, bias, out + row, weight->out);
        } else {
            if (!quantized.q) error = hr_quantize(pool, x, tokens, weight->in, weight->planes, &quantized);
            if (!error) hr_quant_linear(pool, segment, weight->in, &quantized, tokens, bias, out + row, weight->out);
        }
        if (error) return error;
        row += segment->rows;
    }
    return HR_OK;
}

typedef struct {
    const hr_weight *weight;
    const int32_t *ids;
    float *out;
} embed_job;

static void embed_rows(void *argument, int64_t begin, int64_t end, int thread) {
    const embed_job *job = argument;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        const hr_segment *segment = job->weight->segment;
        int64_t row = job->ids[t];
        for (; row >= segment->rows; segment++) row -= segment->rows;
        if (is_dense(segment->kind)) hr_dense_row(segment, job->weight->in, row, job->out + t * job->weight->in);
        else hr_quant_row(segment, job->weight->in, row, job->out + t * job->weight->in);
    }
}

/* ids [tokens] → out [tokens, in] */
HR_API int hr_embed(hr_pool *pool, const hr_weight *weight, const int32_t *ids, int64_t tokens, float *out) {
    for (int64_t t = 0; t < tokens; t++)
        if (ids[t] < 0 || ids[t] >= weight->out) return HR_BAD_TOKEN;
    embed_job job = {weight, ids, out};
    hr_parallel(pool, tokens, 16, embed_rows, &job);
    return HR_OK;
}
