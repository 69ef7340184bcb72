/* Mixture of experts: which experts a token goes to, and the experts themselves.
 *
 * Tokens are sorted by expert; each expert that has any runs the ordinary products on its tokens' rows, one call for all of them, so a
 * weight is read once a step. Products give a row the same bits whatever rows are beside it, and a token's results are added up in the
 * order of its own list: so neither does an expert's crowd change a token. */
#include <math.h>

#include "headrace.h"
#include "simd.h"

/* ---- routing ---- */
static int best_of(const float *by, const uint8_t *taken, int begin, int end) { /* the first of the largest that is not taken */
    int best = -1;
    for (int e = begin; e < end; e++)
        if (!taken[e] && (best < 0 || by[e] > by[best])) best = e;
    return best;
}

/* Experts outside the top_groups best groups are taken from the start; a group counts as its two best experts. */
static void close_groups(const hr_route_args *a, const float *by, uint8_t *taken) {
    float worth[HR_MAX_EXPERTS];
    uint8_t open[HR_MAX_EXPERTS] = {0};
    int size = a->experts / a->groups;
    for (int g = 0; g < a->groups; g++) {
        int first = best_of(by, taken, g * size, (g + 1) * size);
        if (first < 0) __builtin_unreachable(); /* groups have two experts at least, and none is taken yet */
        taken[first] = 1;
        worth[g] = by[first] + by[best_of(by, taken, g * size, (g + 1) * size)];
        taken[first] = 0;
    }
    for (int i = 0; i < a->top_groups; i++) open[best_of(worth, open, 0, a->groups)] = 1;
    for (int e = 0; e < a->experts; e++) taken[e] = !open[e / size];
}

static void route_rows(void *argument, int64_t begin, int64_t end, int thread) {
    const hr_route_args *a = argument;
    float score[HR_MAX_EXPERTS], by[HR_MAX_EXPERTS];
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        uint8_t taken[HR_MAX_EXPERTS] = {0};
        const float *logits = a->logits + t * a->experts;
        int32_t *ids = a->ids + t * a->top_k;
        float *weights = a->weights + t * a->top_k, most = -INFINITY, sum = 0.0f, chosen = 0.0f;
        for (int e = 0; e < a->experts; e++) {
            score[e] = a->sigmoid ? 1.0f / (1.0f + expf(-logits[e])) : logits[e];
            by[e] = a->bias ? score[e] + a->bias[e] : score[e];
        }
        if (a->groups > 1) close_groups(a, by, taken);
        for (int k = 0; k < a->top_k; k++) {
            ids[k] = best_of(by, taken, 0, a->experts);
            taken[ids[k]] = 1;
            if (score[ids[k]] > most) most = score[ids[k]];
        }
        if (!a->sigmoid) {
            for (int e = 0; e < a->experts && !a->normalize; e++) most = score[e] > most ? score[e] : most;
            for (int e = 0; e < a->experts; e++) sum += score[e] = expf(score[e] - most);
        }
        for (int k = 0; k < a->top_k; k++) chosen += score[ids[k]];
        float divisor = a->normalize ? chosen + (a->sigmoid ? 1e-20f : 0.0f) : a->sigmoid ? 1.0f : sum;
        for (int k = 0; k < a->top_k; k++) weights[k] = score[ids[k]] / divisor * a->scale;
    }
}

HR_API int hr_route(hr_pool *pool, const hr_route_args *args) {
    hr_parallel(pool, args->tokens, 4096 / args->experts + 1, route_rows, (void *)args);
    return HR_OK;
}

/* ---- the experts ---- */
typedef struct {
    const hr_experts_args *args;
    const float *parts;   /* [pairs, hidden], sorted by expert */
    const int64_t *place; /* [pairs]: where a token's k-th result lies in parts, -1 for no expert */
    int64_t hidden;
} sum_job;

static void sum_rows(void *argument, int64_t begin, int64_t end, int thread) {
    const sum_job *job = argument;
    int64_t K = job->args->top_k, hidden = job->hidden;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        float *out = job->args->out + t * hidden;
        memset(out, 0, sizeof(float) * (size_t)hidden);
        for (int64_t k = 0; k < K; k++) {
            int64_t place = job->place[t * K + k];
            if (place < 0) continue;
            float scale = job->args->scales[t * K + k];
            for (int64_t i = 0; i < hidden; i++) out[i] += scale * job->parts[place * hidden + i];
        }
    }
}

typedef struct {
    int64_t *place; /* [pairs] */
    float *rows, *pair, *active, *parts; /* [tokens, hidden], [tokens, 2 · inner], [tokens, inner], [pairs, hidden] */
} workspace;

/* Returns the bytes that a workspace takes; with memory NULL that is all it is asked for. */
static size_t place_all(workspace *w, char *memory, int64_t tokens, int64_t pairs, int64_t hidden, int64_t inner) {
    size_t at = 0;
    w->place = (int64_t *)(memory + at), at += sizeof(int64_t) * (size_t)pairs;
    w->rows = (float *)(memory + at), at += sizeof(float) * (size_t)(tokens * hidden);
    w->pair = (float *)(memory + at), at += sizeof(float) * (size_t)(tokens * 2 * inner);
    w->active = (float *)(memory + at), at += sizeof(float) * (size_t)(tokens * inner);
    w->parts = (float *)(memory + at), at += sizeof(float) * (size_t)(pairs * hidden);
    return at;
}

HR_API int hr_experts(hr_pool *pool, const hr_experts_args *args) {
    int64_t K = args->top_k, pairs = args->tokens * K, hidden = args->down[0]->out, inner = args->down[0]->in, done = 0;
    if (!args->tokens) return HR_OK;
    for (int64_t p = 0; p < pairs; p++)
        if (args->ids[p] >= args->experts) return HR_BAD_EXPERT;
    workspace w;
    char *memory = hr_shared(pool, HR_SHARED_EXPERTS, place_all(&w, NULL, args->tokens, pairs, hidden, inner));
    if (!memory) return HR_NO_MEMORY;
    place_all(&w, memory, args->tokens, pairs, hidden, inner);
    for (int64_t p = 0; p < pairs; p++) w.place[p] = -1;
    for (int32_t e = 0; e < args->experts; e++) {
        int64_t count = 0;
        for (int64_t t = 0; t < args->tokens; t++)
            for (int64_t k = 0; k < K; k++)
                if (args->ids[t * K + k] == e && count < args->tokens) {
                    w.place[t * K + k] = done + count;
                    memcpy(w.rows + count++ * hidden, args->x + t * hidden, sizeof(float) * (size_t)hidden);
                }
        if (!count) continue;
        int error = hr_linear(pool, args->gate_up[e], w.rows, count, w.pair);
        if (!error) error = hr_gated(pool, w.pair, count, inner, args->activation, w.active);
        if (!error) error = hr_linear(pool, args->down[e], w.active, count, w.parts + done * hidden);
        if (error) return error;
        done += count;
    }
    sum_job job = {args, w.parts, w.place, hidden};
    hr_parallel(pool, args->tokens, 16384 / (K * hidden) + 1, sum_rows, &job);
    return HR_OK;
}
