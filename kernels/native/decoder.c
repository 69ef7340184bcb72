/* A whole step of a pre-norm decoder in one call: the same operations in the same order as one by one, and so the same bits, without
 * a trip through the interpreter between them. */
#include <string.h>

#include "headrace.h"

typedef struct {
    float *residual, *x, *normed, *qkv, *q, *mixed, *gate_up, *active;
} buffers;

static float *cut(float **memory, int64_t elements) {
    float *piece = *memory;
    *memory += (elements + 15) / 16 * 16;
    return piece;
}

static int64_t lay_out(buffers *b, float *memory, const hr_decoder *d, int64_t tokens) {
    int64_t hidden = d->embedding->in, heads = (int64_t)d->q_heads * d->head_dim, most = 0;
    float *at = memory;
    for (int i = 0; i < d->layers; i++) most = d->layer[i].gate_up->out > most ? d->layer[i].gate_up->out : most;
    b->residual = cut(&at, tokens * hidden);
    b->x = cut(&at, tokens * hidden);
    b->normed = cut(&at, tokens * hidden);
    b->qkv = cut(&at, tokens * (heads + 2 * (int64_t)d->kv_heads * d->head_dim));
    b->q = cut(&at, tokens * heads);
    b->mixed = cut(&at, tokens * heads);
    b->gate_up = cut(&at, tokens * most);
    b->active = cut(&at, tokens * most / 2);
    return at - memory;
}

/* Rows ascend and are distinct, so moving them up in place never overwrites one that is still to come. */
static void keep_rows(float *x, int64_t width, const int64_t *rows, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (rows[i] != i) memcpy(x + i * width, x + rows[i] * width, sizeof(float) * (size_t)width);
}

static int check(const hr_step *s, const hr_rope_args *rope, const hr_attention_args *attention) {
    for (int64_t i = 0; i < s->rows; i++)
        if (s->logit_rows[i] < 0 || s->logit_rows[i] >= s->tokens || (i && s->logit_rows[i] <= s->logit_rows[i - 1])) return HR_BAD_ROW;
    int error = hr_rope_check(rope);
    return error ? error : hr_attention_check(attention);
}

#define TRY(call)                 \
    do {                          \
        int error_ = (call);      \
        if (error_) return error_; \
    } while (0)

HR_API int hr_decoder_run(hr_pool *pool, const hr_decoder *d, const hr_step *s) {
    int64_t tokens = s->tokens, hidden = d->embedding->in, heads = (int64_t)d->q_heads * d->head_dim;
    buffers b;
    if (!tokens) return HR_OK;
    float *memory = hr_shared(pool, HR_SHARED_STEP, sizeof(float) * (size_t)lay_out(&b, NULL, d, tokens));
    if (!memory) return HR_NO_MEMORY;
    lay_out(&b, memory, d, tokens);
    hr_rope_args rope = {.qkv = b.qkv, .positions = s->positions, .slots = s->slots, .cos_sin = d->cos_sin, .q = b.q,
                         .tokens = tokens, .max_positions = d->max_positions, .num_slots = s->num_pages * s->page_size,
                         .q_heads = d->q_heads, .kv_heads = d->kv_heads, .head_dim = d->head_dim, .page_size = s->page_size,
                         .kv_kind = s->kv_kind, .eps = d->eps};
    hr_attention_args attention = {.q = b.q, .q_starts = s->q_starts, .kv_lens = s->kv_lens, .page_table = s->page_table,
                                   .out = b.mixed, .tokens = tokens, .num_pages = s->num_pages, .seqs = s->seqs,
                                   .table_width = s->table_width, .q_heads = d->q_heads, .kv_heads = d->kv_heads,
                                   .head_dim = d->head_dim, .page_size = s->page_size, .kv_kind = s->kv_kind, .scale = d->scale};
    TRY(check(s, &rope, &attention));
    TRY(hr_embed(pool, d->embedding, s->token_ids, tokens, b.residual));
    for (int i = 0; i < d->layers; i++) {
        const hr_layer *layer = &d->layer[i];
        if (i == 0) TRY(hr_rms_norm(pool, b.residual, NULL, layer->attention_norm, tokens, hidden, d->eps, b.normed));
        else TRY(hr_rms_norm(pool, b.x, b.residual, layer->attention_norm, tokens, hidden, d->eps, b.normed));
        TRY(hr_linear(pool, layer->qkv, b.normed, tokens, b.qkv));
        rope.q_norm = layer->q_norm, rope.k_norm = layer->k_norm;
        rope.keys = s->keys[i], rope.values = s->values[i];
        attention.keys = s->keys[i], attention.values = s->values[i];
        attention.window = (int32_t)layer->window;
        TRY(hr_rope_cache(pool, &rope));
        if (i == d->layers - 1 && !s->rows) return HR_OK; /* nobody looks at the last layer's output */
        TRY(hr_attention(pool, &attention));
        if (i == d->layers - 1 && s->rows < tokens) {
            keep_rows(b.mixed, heads, s->logit_rows, s->rows);
            keep_rows(b.residual, hidden, s->logit_rows, s->rows);
            tokens = s->rows;
        }
        TRY(hr_linear(pool, layer->output, b.mixed, tokens, b.x));
        TRY(hr_rms_norm(pool, b.x, b.residual, layer->mlp_norm, tokens, hidden, d->eps, b.normed));
        TRY(hr_linear(pool, layer->gate_up, b.normed, tokens, b.gate_up));
        TRY(hr_gated(pool, b.gate_up, tokens, layer->gate_up->out / 2, d->gelu, b.active));
        TRY(hr_linear(pool, layer->down, b.active, tokens, b.x));
    }
    TRY(hr_rms_norm(pool, b.x, b.residual, d->norm, tokens, hidden, d->eps, b.normed));
    return hr_linear(pool, d->head, b.normed, tokens, s->logits);
}
