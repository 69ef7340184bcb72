/* Causal attention of packed queries over paged keys and values, with an online softmax.
 *
 * A task is a key/value head of a sequence and a block of its query tokens; the query heads of the group are rows beside each other, so
 * that a tile of keys is loaded once for all of them. Tiles are HR_KEYS keys at absolute positions (multiples of HR_KEYS), whatever the
 * chunk of queries and the page size; a tile that a row may not see leaves its state bit for bit as it was. So a row's result is the same
 * in a decode step, in a chunk and in a whole prompt. */
#include <math.h>

#include "headrace.h"
#include "microkernel.h"

enum { HR_KEYS = 32, ROWS = 48 };

typedef struct {
    int32_t seq, first; /* first query token of the block, within the sequence's queries */
} block_task;

typedef struct {
    const hr_attention_args *args;
    hr_pool *pool;
    const block_task *tasks;
    int64_t tasks_total, block_tokens, wide; /* wide: head_dim rounded up to whole microkernel columns */
} attention_job;

typedef struct {
    float *q, *k, *v, *p, *out, *most, *total;
} workspace;

/* Returns the bytes that a workspace takes; with memory NULL that is all it is asked for. */
static size_t place(workspace *w, float *memory, int64_t rows, int64_t wide) {
    int64_t at = 0;
    w->q = memory + at, at += rows * wide;
    w->k = memory + at, at += wide * HR_KEYS; /* transposed: [D, HR_KEYS] */
    w->v = memory + at, at += HR_KEYS * wide;
    w->p = memory + at, at += rows * HR_KEYS;
    w->out = memory + at, at += rows * wide;
    w->most = memory + at, at += rows;
    w->total = memory + at, at += rows;
    return sizeof(float) * (size_t)at;
}

#if defined(HR_AVX512) || defined(HR_AVX2)
static inline void transpose8(const __m256 in[8], float *out) { /* rows of in become columns of out, whose rows are HR_KEYS apart */
    __m256 a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
        b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * HR_KEYS, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * HR_KEYS, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}

static inline __m256 load8(const void *p, int64_t index, int kind) {
    if (kind == HR_F32) return _mm256_loadu_ps((const float *)p + index);
    if (kind == HR_E4M3) return hr_load8_e4m3((const uint8_t *)p + index);
    __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + index));
    if (kind == HR_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
#endif

/* Keys at[0 .. count) of the cache, each D long, transposed into out [D, HR_KEYS]; columns count .. HR_KEYS-1 are zeroed. */
HR_INLINE void load_keys(const void *keys, const int64_t *at, int64_t count, int64_t D, int kind, float *out) {
    int64_t d = 0;
    if (count < HR_KEYS) memset(out, 0, sizeof(float) * (size_t)(D * HR_KEYS));
#if defined(HR_AVX512) || defined(HR_AVX2)
    for (; d + 8 <= D; d += 8) {
        for (int64_t k = 0; k < count; k += 8) {
            __m256 rows[8];
            for (int i = 0; i < 8; i++) rows[i] = k + i < count ? load8(keys, at[k + i] + d, kind) : _mm256_setzero_ps();
            transpose8(rows, out + d * HR_KEYS + k);
        }
    }
#endif
    for (; d < D; d++)
        for (int64_t k = 0; k < count; k++) out[d * HR_KEYS + k] = hr_load_kind(keys, at[k] + d, kind);
}

HR_INLINE void load_values(const void *values, const int64_t *at, int64_t count, int64_t D, int64_t wide, int kind, float *out) {
    for (int64_t k = 0; k < count; k++) {
        int64_t d = 0;
        for (; d + HR_LANES <= D; d += HR_LANES) vf_store(out + k * wide + d, vf_load_kind(values, at[k] + d, kind));
        for (; d < D; d++) out[k * wide + d] = hr_load_kind(values, at[k] + d, kind);
        for (; d < wide; d++) out[k * wide + d] = 0.0f;
    }
}

/* Scores count as cap · tanh(score / cap). */
HR_INLINE void cap_scores(float *scores, int64_t count, float cap) {
    for (int64_t k = 0; k < count; k += HR_LANES) {
        vf grown = vf_exp(vf_load(scores + k) * (2.0f / cap));
        vf_store(scores + k, cap - 2.0f * cap / (grown + 1.0f));
    }
}

/* One row's scores s [HR_KEYS] become probabilities relative to the row's running maximum; keys outside [low, high) get 0.
 * Returns the factor by which the row's earlier output shrinks. */
HR_INLINE float soften(float *s, int64_t low, int64_t high, float *most, float *total) {
    vf peak = vf_set(-FLT_MAX), sum = {0};
    int whole = low <= 0 && high >= HR_KEYS;
    vf from = vf_set((float)low), to = vf_set((float)high);
    for (int k = 0; k < HR_KEYS; k += HR_LANES) {
        vf x = vf_load(s + k);
        if (!whole) {
            vf index = vf_iota() + (float)k;
            x = vf_pick((index >= from) & (index < to), x, vf_set(-FLT_MAX));
            vf_store(s + k, x);
        }
        peak = vf_max(peak, x);
    }
    float before = *most, after = vf_largest(peak);
    if (after < before) after = before;
    for (int k = 0; k < HR_KEYS; k += HR_LANES) {
        vf x = vf_load(s + k), p = vf_exp(x - after);
        if (!whole) p = vf_pick(x == -FLT_MAX, vf_set(0.0f), p);
        vf_store(s + k, p);
        sum = sum + p;
    }
    float shrink = before == after ? 1.0f : vf_exp(vf_set(before - after))[0];
    *most = after;
    *total = *total * shrink + vf_sum(sum);
    return shrink;
}

/* Where the keys at positions base .. of a head lie, in elements; at most HR_KEYS of them before `end`. Returns their number. */
HR_INLINE int64_t find(const hr_attention_args *a, const int32_t *table, int64_t head, int64_t base, int64_t end, int64_t *at) {
    int64_t page = a->page_size, count = end - base < HR_KEYS ? end - base : HR_KEYS, entry = base / page, offset = base % page;
    for (int64_t k = 0; k < count; entry++, offset = 0) {
        int64_t place = (((int64_t)table[entry] * a->kv_heads + head) * page + offset) * a->head_dim;
        int64_t last = k + page - offset < count ? k + page - offset : count;
        for (; k < last; k++, place += a->head_dim) at[k] = place;
    }
    return count;
}

/* Pages lie anywhere, so the processor cannot guess the next tile. */
HR_INLINE void prefetch(const void *cache, int64_t at, int64_t D, int kind) {
    const char *first = (const char *)cache + at * hr_kind_bytes(kind);
    for (int64_t byte = 0; byte < D * hr_kind_bytes(kind); byte += 64) __builtin_prefetch(first + byte);
}

HR_INLINE void run_task(const attention_job *job, int64_t index, int thread, int kind) {
    const hr_attention_args *a = job->args;
    int64_t D = a->head_dim, wide = job->wide, group = a->q_heads / a->kv_heads;
    block_task task = job->tasks[job->tasks_total - 1 - index / a->kv_heads]; /* the longest ones stand last in a sequence */
    int64_t head = index % a->kv_heads, start = a->q_starts[task.seq], queries = a->q_starts[task.seq + 1] - start;
    int64_t tokens = queries - task.first < job->block_tokens ? queries - task.first : job->block_tokens, rows = tokens * group;
    int64_t length = a->kv_lens[task.seq], position = length - queries + task.first; /* of the block's first token */
    const int32_t *table = a->page_table + (int64_t)task.seq * a->table_width;
    workspace w;
    int64_t most = job->block_tokens * group;
    place(&w, hr_scratch(job->pool, thread, place(&w, NULL, most, wide)), most, wide);

    for (int64_t r = 0; r < rows; r++) {
        const float *q = a->q + ((start + task.first + r / group) * a->q_heads + head * group + r % group) * D;
        for (int64_t d = 0; d < D; d++) w.q[r * wide + d] = q[d] * a->scale;
        w.most[r] = -FLT_MAX;
        w.total[r] = 0.0f;
    }
    memset(w.out, 0, sizeof(float) * (size_t)(rows * wide));
    int64_t end = position + tokens, first = a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
    for (int64_t base = first / HR_KEYS * HR_KEYS; base < end; base += HR_KEYS) {
        int64_t at[HR_KEYS], ahead[HR_KEYS], count = find(a, table, head, base, end, at);
        int64_t next = base + HR_KEYS < end ? find(a, table, head, base + HR_KEYS, end, ahead) : 0;
        for (int64_t k = 0; k < next; k++) {
            prefetch(a->keys, ahead[k], D, kind);
            prefetch(a->values, ahead[k], D, kind);
        }
        load_keys(a->keys, at, count, D, kind, w.k);
        load_values(a->values, at, count, D, wide, kind, w.v);
        hr_product(rows, HR_KEYS, w.q, wide, w.k, HR_KEYS, D, 0, w.p, HR_KEYS);
        if (a->softcap > 0.0f) cap_scores(w.p, rows * HR_KEYS, a->softcap);
        for (int64_t r = 0; r < rows; r++) {
            int64_t own = position + r / group, high = own + 1 - base, low = a->window > 0 ? own - a->window + 1 - base : 0;
            float shrink = soften(w.p + r * HR_KEYS, low, high, w.most + r, w.total + r);
            if (shrink != 1.0f)
                for (int64_t d = 0; d < wide; d++) w.out[r * wide + d] *= shrink;
        }
        hr_product(rows, wide, w.p, HR_KEYS, w.v, wide, count, 1, w.out, wide);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *out = a->out + ((start + task.first + r / group) * a->q_heads + head * group + r % group) * D;
        float inverse = 1.0f / w.total[r];
        if (a->sinks) {
            float sink = a->sinks[head * group + r % group], most = sink > w.most[r] ? sink : w.most[r], shrink = expf(w.most[r] - most);
            inverse = shrink / (w.total[r] * shrink + expf(sink - most));
        }
        for (int64_t d = 0; d < D; d++) out[d] = w.out[r * wide + d] * inverse;
    }
}

static void tasks_f32(void *job, int64_t begin, int64_t end, int thread) { while (begin < end) run_task(job, begin++, thread, HR_F32); }
static void tasks_bf16(void *job, int64_t begin, int64_t end, int thread) { while (begin < end) run_task(job, begin++, thread, HR_BF16); }
static void tasks_f16(void *job, int64_t begin, int64_t end, int thread) { while (begin < end) run_task(job, begin++, thread, HR_F16); }
static void tasks_e4m3(void *job, int64_t begin, int64_t end, int thread) { while (begin < end) run_task(job, begin++, thread, HR_E4M3); }

/* Every length and every page that will be read lies inside its table and cache; nothing is read before this holds. */
int hr_attention_check(const hr_attention_args *a) {
    if (a->q_starts[0] != 0 || a->q_starts[a->seqs] != a->tokens) return HR_BAD_LENGTH;
    for (int32_t s = 0; s < a->seqs; s++) {
        int64_t queries = (int64_t)a->q_starts[s + 1] - a->q_starts[s], length = a->kv_lens[s];
        if (queries < 0 || length < queries || length > (int64_t)a->table_width * a->page_size) return HR_BAD_LENGTH;
        for (int64_t p = 0; p * a->page_size < length; p++) {
            int32_t page = a->page_table[(int64_t)s * a->table_width + p];
            if (page < 0 || page >= a->num_pages) return HR_BAD_PAGE;
        }
    }
    return HR_OK;
}

HR_API int hr_attention(hr_pool *pool, const hr_attention_args *args) {
    if (!args->tokens) return HR_OK;
    int error = hr_attention_check(args);
    if (error) return error;
    int64_t group = args->q_heads / args->kv_heads, block = ROWS / group > 0 ? ROWS / group : 1, total = 0;
    for (int32_t s = 0; s < args->seqs; s++) total += (args->q_starts[s + 1] - args->q_starts[s] + block - 1) / block;
    block_task *tasks = hr_shared(pool, HR_SHARED_TASKS, sizeof(block_task) * (size_t)total);
    if (!tasks) return HR_NO_MEMORY;
    int64_t n = 0, wide = (args->head_dim + HR_WIDE - 1) / HR_WIDE * HR_WIDE;
    for (int32_t s = 0; s < args->seqs; s++)
        for (int64_t first = 0; first < args->q_starts[s + 1] - args->q_starts[s]; first += block)
            tasks[n++] = (block_task){s, (int32_t)first};
    workspace sizes;
    for (int i = 0; i < hr_threads(pool); i++)
        if (!hr_scratch(pool, i, place(&sizes, NULL, block * group, wide))) return HR_NO_MEMORY;
    attention_job job = {args, pool, tasks, total, block, wide};
    hr_range run = args->kv_kind == HR_F32 ? tasks_f32 : args->kv_kind == HR_BF16 ? tasks_bf16 : args->kv_kind == HR_F16 ? tasks_f16 : tasks_e4m3;
    hr_parallel(pool, total * args->kv_heads, 1, run, &job);
    return HR_OK;
}
