/* What the native CPU operations share: the thread pool, the layout of packed weights, and the argument structs that
 * kernels/cpu.py fills in. Every array is row-major; activations are float32; sizes are in elements unless said. */
#ifndef HEADRACE_H
#define HEADRACE_H

#include <stddef.h>
#include <stdint.h>

#define HR_API __attribute__((visibility("default")))
#define HR_INLINE static inline __attribute__((always_inline))

enum hr_kind { HR_F32 = 0, HR_BF16 = 1, HR_F16 = 2, HR_Q4_0 = 3, HR_Q4_1 = 4, HR_Q8_0 = 5, HR_E4M3 = 6 /* KV caches alone */ };
enum { HR_BLOCK = 32, HR_MAX_HEAD = 640, HR_MAX_EXPERTS = 1024 };
enum hr_activation { HR_SILU = 0, HR_GELU_TANH = 1, HR_CLAMPED_SILU = 2 };

/* Result of the operations: 0, or what was wrong with the input. */
enum hr_error { HR_OK = 0, HR_NO_MEMORY = 1, HR_BAD_TOKEN = 2, HR_BAD_SLOT = 3, HR_BAD_POSITION = 4, HR_BAD_PAGE = 5,
                HR_BAD_LENGTH = 6, HR_BAD_ROW = 7, HR_BAD_EXPERT = 8 };

/* ---- pool.c ---- */
typedef struct hr_pool hr_pool;
typedef void (*hr_range)(void *job, int64_t begin, int64_t end, int thread);

/* Run `run` over [0, total) in chunks of at most `grain`, taken by whichever thread is free. The caller takes part. */
void hr_parallel(hr_pool *pool, int64_t total, int64_t grain, hr_range run, void *job);
int hr_threads(const hr_pool *pool);
/* Scratch memory that lives until the next request for the same slot, 64-byte aligned; NULL when there is no memory.
 * Slots 0 .. threads-1 belong to the threads; hr_shared has its own, used by the caller before it starts a parallel run. */
void *hr_scratch(hr_pool *pool, int thread, size_t bytes);
enum hr_shared_slot { HR_SHARED_ACTIVATIONS = 0, HR_SHARED_TASKS = 1, HR_SHARED_STEP = 2, HR_SHARED_EXPERTS = 3, HR_SHARED_SLOTS = 4 };
void *hr_shared(hr_pool *pool, enum hr_shared_slot slot, size_t bytes);

/* ---- weights ---- */
typedef struct {
    int32_t kind;
    int32_t rows;
    const uint8_t *data; /* packed by hr_pack */
} hr_segment;

typedef struct {
    int32_t in, out, segments;
    int32_t planes; /* int8 planes of activations for packed segments: 1 or 2 */
    const hr_segment *segment;
    const float *bias; /* NULL or [out] */
} hr_weight;

typedef struct {
    const int8_t *q;    /* [T, in / 32, planes, 32] */
    const float *scale; /* [T, in / 32]: of the last plane; a plane counts 256 times the next */
    const float *sum;   /* [T, in / 32]: scale times the sum of the block's values */
    int planes;
} hr_quantized;

int64_t hr_quant_bytes(int kind, int64_t rows, int64_t in);
void hr_quant_pack(int kind, int64_t rows, int64_t in, const uint8_t *source, uint8_t *packed);
void hr_quant_row(const hr_segment *segment, int64_t in, int64_t row, float *out);
int hr_quantize(hr_pool *pool, const float *x, int64_t tokens, int64_t in, int planes, hr_quantized *out);
void hr_quant_linear(hr_pool *pool, const hr_segment *segment, int64_t in, const hr_quantized *x, int64_t tokens,
                     const float *bias, float *out, int64_t stride);

int64_t hr_dense_bytes(int kind, int64_t rows, int64_t in);
void hr_dense_pack(int kind, int64_t rows, int64_t in, const uint8_t *source, uint8_t *packed);
void hr_dense_row(const hr_segment *segment, int64_t in, int64_t row, float *out);
int hr_dense_linear(hr_pool *pool, const hr_segment *segment, int64_t in, const float *x, int64_t tokens,
                    const float *bias, float *out, int64_t stride);

/* ---- arguments of the larger operations ---- */
typedef struct {
    const float *qkv; /* [tokens, q, k and v]; without v where values is keys */
    const int32_t *positions, *slots;
    const float *cos_sin;
    const float *q_norm, *k_norm; /* NULL or [head_dim] */
    void *keys, *values;
    float *q;
    int64_t tokens, max_positions, num_slots;
    int32_t q_heads, kv_heads, head_dim, page_size, kv_kind;
    float eps;
} hr_rope_args;

typedef struct {
    const float *q;
    const void *keys, *values;
    const int32_t *q_starts, *kv_lens, *page_table;
    float *out;
    int64_t tokens, num_pages;
    int32_t seqs, table_width, q_heads, kv_heads, head_dim, page_size, kv_kind, window;
    float scale, softcap; /* softcap 0: scores as they are */
    const float *sinks;   /* NULL or [q_heads]: a score of each head's without a value */
} hr_attention_args;

typedef struct {
    const float *logits, *bias; /* [tokens, experts]; NULL or [experts] */
    int32_t *ids;               /* [tokens, top_k] */
    float *weights;             /* [tokens, top_k] */
    int64_t tokens;
    int32_t experts, top_k, groups, top_groups, sigmoid, normalize;
    float scale;
} hr_route_args;

typedef struct {
    const float *x;      /* [tokens, hidden] */
    const int32_t *ids;  /* [tokens, top_k], below 0 for none; distinct in a row */
    const float *scales; /* [tokens, top_k] */
    const hr_weight *const *gate_up, *const *down; /* [experts], all of one shape */
    float *out;                                    /* [tokens, hidden] */
    int64_t tokens;
    int32_t top_k, experts, activation;
} hr_experts_args;

/* ---- a whole decoder: weights, and one step's inputs ---- */
typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *q_norm, *k_norm;           /* NULL or [head_dim] */
    const hr_weight *qkv, *output, *gate_up, *down;
    int64_t window;
} hr_layer;

typedef struct {
    const hr_weight *embedding, *head;
    const float *norm, *cos_sin;
    const hr_layer *layer;
    int64_t max_positions;
    int32_t layers, q_heads, kv_heads, head_dim, gelu;
    float eps, scale;
} hr_decoder;

typedef struct {
    const int32_t *token_ids, *positions, *slots, *q_starts, *kv_lens, *page_table;
    const int64_t *logit_rows; /* ascending */
    void *const *keys, *const *values; /* one per layer */
    float *logits;                     /* [rows, vocabulary] */
    int64_t tokens, rows, num_pages;
    int32_t seqs, table_width, page_size, kv_kind;
} hr_step;

/* ---- the operations ---- */
HR_API int hr_lanes(void);
HR_API hr_pool *hr_pool_new(int threads);
HR_API void hr_pool_free(hr_pool *pool);
HR_API int64_t hr_packed_bytes(int kind, int64_t rows, int64_t in);
HR_API void hr_pack(int kind, int64_t rows, int64_t in, const uint8_t *source, uint8_t *packed);
HR_API int hr_linear(hr_pool *pool, const hr_weight *weight, const float *x, int64_t tokens, float *out);
HR_API int hr_embed(hr_pool *pool, const hr_weight *weight, const int32_t *ids, int64_t tokens, float *out);
HR_API int hr_rms_norm(hr_pool *pool, const float *x, float *residual, const float *weight, int64_t rows, int64_t width, float eps,
                       float *out);
HR_API int hr_gated(hr_pool *pool, const float *x, int64_t rows, int64_t width, int kind, float *out);
HR_API int hr_rope_cache(hr_pool *pool, const hr_rope_args *args);
HR_API int hr_attention(hr_pool *pool, const hr_attention_args *args);
HR_API int hr_route(hr_pool *pool, const hr_route_args *args);
HR_API int hr_experts(hr_pool *pool, const hr_experts_args *args);
HR_API int hr_decoder_run(hr_pool *pool, const hr_decoder *decoder, const hr_step *step);
int hr_rope_check(const hr_rope_args *args);
int hr_attention_check(const hr_attention_args *args);

#endif
