/* Kernels for decoding: a linear map of a handful of tokens is bound by reading its weights once, and
   everything else by the number of calls and threads' meetings it takes, so that a whole layer is one
   call. Compiled at first use by native.py for the machine at hand.

   Float32 accumulation throughout; bfloat16 is widened on reading and rounded to nearest even on
   writing. Vectors are the compiler's own, so that one source serves AVX2, AVX-512 and NEON. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float vec_any __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));
typedef uint32_t bits_any __attribute__((vector_size(LANES * 4), aligned(2)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t half_any __attribute__((vector_size(LANES * 2), aligned(2)));

enum then { NOTHING, SILU, ADD, MULTIPLY };

static inline vec load_f32(const float *p) { return *(const vec_any *)p; }
static inline vec load_bf16(const bf16 *p) {
    return (vec)(__builtin_convertvector(*(const half_any *)p, bits) << 16);
}
static inline float get_f32(const float *p) { return *p; }
static inline float get_bf16(const bf16 *p) {
    uint32_t wide = (uint32_t)*p << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static inline void put_f32(float *p, float value) { *p = value; }
static inline void put_bf16(bf16 *p, float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    if (value != value)
        *p = 0x7fc0;
    else
        *p = (bf16)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}
#define LOAD_float load_f32
#define GET_float get_f32
#define PUT_float put_f32
#define LOAD_bf16 load_bf16
#define GET_bf16 get_bf16
#define PUT_bf16 put_bf16

static inline float sum(vec v) {
#if defined(__GNUC__) && !defined(__clang__)
    for (int half = LANES / 2; half; half /= 2) {
        ints partner;
        for (int i = 0; i < LANES; i++) partner[i] = i ^ half;
        v += __builtin_shuffle(v, partner);
    }
    return v[0];
#else
    float lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

/* e^x, within 2 units of the last place, 0 below e^-87; NaN stays NaN */
static inline vec exponential(vec x) {
    const vec low = (vec){0} - 87.0f, high = (vec){0} + 88.0f, magic = (vec){0} + 12582912.0f;
    ints below = x < low, above = x > high;
    x = (vec)(((ints)x & ~(below | above)) | ((ints)low & below) | ((ints)high & above));
    vec power = x * 1.44269504f + magic; /* its last bits are the whole power of two */
    ints whole = (ints)power - (ints)magic;
    power -= magic;
    vec r = x - power * 0.693359375f + power * 2.12194440e-4f;
    vec y = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r +
              4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    return (vec)((ints)((y * r * r + r + 1.0f) * (vec)((whole + 127) << 23)) & ~below);
}

/* Linear maps read their weights as panels [in, PANEL] of PANEL output rows: in the order they lie,
   while the next panel is fetched. Lanes are rows, so nothing is summed across them, and an output is
   the same sum however many tokens there are. */
#define PANEL 16
#define VECS (PANEL / LANES)
#if LANES == 16
#define GROUP 12 /* tokens whose sums the registers hold */
#else
#define GROUP 6
#endif
#define PAGE 512 /* tokens whose states the caches hold */
#define MANY 32  /* tokens worth a second thread where little is done to each */
#define RUN 64   /* products summed one after the other: a sum of short sums rounds less */

#if defined(__x86_64__) /* keep in a register what would otherwise be read again for every token */
#define HOLD(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define HOLD(v) __asm__("" : "+w"(v))
#else
#define HOLD(v)
#endif

/* Columns that lie together, and their vectors [DEPTH] of LANES rows. Two bfloat16 numbers of a row
   share a word, so that widening is a shift or a mask. */
#define DEPTH_float 1
#define DEPTH_bf16 2
static inline void take_float(const float *from, vec *columns) { columns[0] = load_f32(from); }
static inline void take_bf16(const bf16 *from, vec *columns) {
    bits pairs = *(const bits_any *)from;
    columns[0] = (vec)(pairs << 16);
    columns[1] = (vec)(pairs & 0xffff0000u);
}

/* sums[n][r] = panel row r . token n, whose k-th number is x[k * column + n * token]; the panel is
   [in / DEPTH, vecs * LANES, DEPTH], and every column of it fetches `step` weights of `ahead` */
#define SUMS(W)                                                                                    \
    static inline __attribute__((always_inline)) void sums_##W(                                    \
        const W *panel, const W *ahead, long step, const float *x, long column, long token,        \
        long in, float sums[GROUP][PANEL], const int tokens, const int vecs) {                     \
        vec total[GROUP][VECS] = {{{0}}};                                                          \
        for (long start = 0; start < in; start += RUN) {                                           \
            long stop = start + RUN < in ? start + RUN : in;                                       \
            vec acc[GROUP][VECS];                                                                  \
            for (int n = 0; n < tokens; n++)                                                       \
                for (int v = 0; v < vecs; v++) acc[n][v] = (vec){0};                               \
            for (long k = start; k < stop; k += DEPTH_##W) {                                       \
                vec w[VECS][DEPTH_##W];                                                            \
                for (int v = 0; v < vecs; v++)                                                     \
                    take_##W(panel + (k * vecs + v * DEPTH_##W) * LANES, w[v]);                    \
                __builtin_prefetch(ahead + k * step, 0, 2);                                        \
                for (int d = 0; d < DEPTH_##W; d++) {                                              \
                    for (int v = 0; v < vecs; v++) HOLD(w[v][d]);                                  \
                    for (int n = 0; n < tokens; n++)                                               \
                        for (int v = 0; v < vecs; v++)                                             \
                            acc[n][v] += w[v][d] * x[(k + d) * column + n * token];                \
                }                                                                                  \
            }                                                                                      \
            for (int n = 0; n < tokens; n++)                                                       \
                for (int v = 0; v < vecs; v++) total[n][v] += acc[n][v];                           \
        }                                                                                          \
        for (int n = 0; n < tokens; n++) memcpy(sums[n], total[n], vecs * sizeof(vec));            \
    }

SUMS(float)
SUMS(bf16)

#define FINISH(T)                                                                                  \
    static inline void finish_##T(float *sums, long rows, const T *bias, const T *other, int then, \
                                  T *y) {                                                          \
        for (long r = 0; bias && r < rows; r++) sums[r] += GET_##T(bias + r);                      \
        for (long r = 0; then == SILU && r < PANEL; r += LANES) {                                  \
            vec sum = load_f32(sums + r);                                                          \
            sum = sum / (exponential(-sum) + 1.0f);                                                \
            memcpy(sums + r, &sum, sizeof sum);                                                    \
        }                                                                                          \
        for (long r = 0; then == ADD && r < rows; r++) sums[r] += GET_##T(other + r);              \
        for (long r = 0; then == MULTIPLY && r < rows; r++) sums[r] *= GET_##T(other + r);         \
        for (long r = 0; r < rows; r++) PUT_##T(y + r, sums[r]);                                   \
    }

#if GROUP == 6
#define EACH(DO, with) DO(with, 1) DO(with, 2) DO(with, 3) DO(with, 4) DO(with, 5) DO(with, 6)
#else
#define EACH(DO, with)                                                                             \
    DO(with, 1) DO(with, 2) DO(with, 3) DO(with, 4) DO(with, 5) DO(with, 6)                        \
    DO(with, 7) DO(with, 8) DO(with, 9) DO(with, 10) DO(with, 11) DO(with, 12)
#endif

/* A weight [out, in] as panels, in bfloat16 where `half`, and a bias or null */
typedef struct {
    const void *weight, *bias;
    long in, out;
    int half;
} map;

typedef struct {
    const void *weight; /* null: there is none */
    float epsilon;
} norm;

/* Functions that end in _team are run by all threads of a parallel region: they share its loops */
#define MAP(W, count)                                                                              \
    case count:                                                                                    \
        sums_##W(panel, ahead, step, turned + first * deep, count, 1, deep, sums, count, VECS);    \
        break;

/* y [tokens, out] = then(x [tokens, in] weight^T + bias, other [tokens, out]); a page of tokens, which
   `turned` holds */
#define LINEAR(W, T)                                                                               \
    static void page_##W##_##T##_team(const map *to, const T *x, const T *other, T *y,             \
                                      long tokens, int then, float *turned) {                      \
        const W *weight = to->weight;                                                              \
        const T *bias = to->bias;                                                                  \
        long in = to->in, out = to->out;                                                           \
        long groups = (tokens + GROUP - 1) / GROUP, size = (tokens + groups - 1) / groups;         \
        long panels = (out + PANEL - 1) / PANEL, step = (PANEL + groups - 1) / groups;             \
        long deep = (in + DEPTH_##W - 1) / DEPTH_##W * DEPTH_##W;                                  \
        _Pragma("omp for schedule(static)") for (long n = 0; n < tokens; n++) {                    \
            long first = n - n % size;                                                             \
            long count = tokens - first < size ? tokens - first : size;                            \
            float *column = turned + first * deep + n - first; /* groups of [deep, size] */        \
            for (long k = 0; k < in; k++) column[k * count] = GET_##T(x + n * in + k);             \
            if (in < deep) column[in * count] = 0;                                                 \
        }                                                                                          \
        _Pragma("omp for schedule(static)") for (long p = 0; p < panels; p++) {                    \
            const W *panel = weight + p * deep * PANEL, *ahead = panel + deep * PANEL;             \
            long row = p * PANEL, rows = out - row < PANEL ? out - row : PANEL;                    \
            for (long first = 0; first < tokens; first += size, ahead += deep * step) {            \
                long count = tokens - first < size ? tokens - first : size;                        \
                float sums[GROUP][PANEL];                                                          \
                switch (count) { EACH(MAP, W) }                                                    \
                for (long n = 0; n < count; n++) {                                                 \
                    long place = (first + n) * out + row;                                          \
                    finish_##T(sums[n], rows, bias ? bias + row : 0, other ? other + place : 0,    \
                               then, y + place);                                                   \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

/* numbers that `turned` must hold for a map of so many tokens, a column more than there are */
static inline long turned_size(long tokens, long in) {
    return (tokens < PAGE ? tokens : PAGE) * (in + 1);
}

#define MAPS(T)                                                                                    \
    static void linear_##T##_team(const map *to, const T *x, const T *other, T *y, long tokens,    \
                                  int then, float *turned) {                                       \
        for (long n = 0; n < tokens; n += PAGE) {                                                  \
            long some = tokens - n < PAGE ? tokens - n : PAGE;                                     \
            const T *from = x + n * to->in, *others = other ? other + n * to->out : 0;             \
            T *into = y + n * to->out;                                                             \
            if (to->half)                                                                          \
                page_bf16_##T##_team(to, from, others, into, some, then, turned);                  \
            else                                                                                   \
                page_##T##_##T##_team(to, from, others, into, some, then, turned);                 \
        }                                                                                          \
    }                                                                                              \
    void linear_##T(const map *to, const T *x, const T *other, T *y, long tokens, int then) {      \
        float *turned = malloc(turned_size(tokens, to->in) * sizeof(float));                       \
        _Pragma("omp parallel") linear_##T##_team(to, x, other, y, tokens, then, turned);          \
        free(turned);                                                                              \
    }

/* y [width] = x / rms(x) * weight */
#define RMS_NORM(T)                                                                                \
    static inline void rms_norm_of_##T(const norm *by, const T *x, T *y, long width) {             \
        const T *weight = by->weight;                                                              \
        vec lanes = (vec){0};                                                                      \
        long k = 0;                                                                                \
        for (; k + LANES <= width; k += LANES) lanes += LOAD_##T(x + k) * LOAD_##T(x + k);         \
        float squares = sum(lanes);                                                                \
        for (; k < width; k++) squares += GET_##T(x + k) * GET_##T(x + k);                         \
        float scale = 1.0f / sqrtf(squares / width + by->epsilon);                                 \
        for (long i = 0; i < width; i++)                                                           \
            PUT_##T(y + i, GET_##T(x + i) * scale * GET_##T(weight + i));                          \
    }                                                                                              \
    void rms_norm_##T(const norm *by, const T *x, T *y, long tokens, long width) {                 \
        _Pragma("omp parallel for if (tokens > MANY)") for (long n = 0; n < tokens; n++)           \
            rms_norm_of_##T(by, x + n * width, y + n * width, width);                              \
    }

/* x [heads, width], turned in place by cosine and sine [width], the sine's first half negated */
#define ROTATE(T)                                                                                  \
    static inline void rotate_of_##T(T *x, const T *cos, const T *sin, long heads, long width) {   \
        long half = width / 2;                                                                     \
        for (long h = 0; h < heads; h++) {                                                         \
            T *low = x + h * width, *high = low + half;                                            \
            for (long d = 0; d < half; d++) {                                                      \
                float a = GET_##T(low + d), b = GET_##T(high + d);                                 \
                PUT_##T(low + d, a * GET_##T(cos + d) + b * GET_##T(sin + d));                     \
                PUT_##T(high + d, b * GET_##T(cos + half + d) + a * GET_##T(sin + half + d));      \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    /* x [tokens, heads, width], tokens `stride` apart, their phases `phase_stride` */             \
    void rotate_##T(T *x, long stride, const T *cos, const T *sin, long phase_stride, long tokens, \
                    long heads, long width) {                                                      \
        _Pragma("omp parallel for if (tokens > MANY)") for (long n = 0; n < tokens; n++)           \
            rotate_of_##T(x + n * stride, cos + n * phase_stride, sin + n * phase_stride, heads,   \
                          width);                                                                  \
    }

/* Attention: lanes are the queries that share a key head, so nothing is summed across them either */
#define SCORE(vecs, count)                                                                         \
    case count:                                                                                    \
        sums_float(asked, asked, 0, keys + c * stride, 1, stride, dim, sums, count, vecs);         \
        break;
#define MIX(vecs, count)                                                                           \
    case count:                                                                                    \
        sums_float(weights, weights, 0, values + d, stride, 1, columns, sums, count, vecs);        \
        break;

/* scores [columns, lanes] of asked [dim, lanes] */
static inline __attribute__((always_inline)) void score(const float *asked, const float *keys,
                                                        long stride, long columns, long dim,
                                                        float *scores, const int vecs) {
    for (long c = 0; c < columns; c += GROUP) {
        long count = columns - c < GROUP ? columns - c : GROUP;
        float sums[GROUP][PANEL];
        switch (count) { EACH(SCORE, vecs) }
        for (long n = 0; n < count; n++)
            memcpy(scores + (c + n) * vecs * LANES, sums[n], vecs * sizeof(vec));
    }
}

/* scores [columns, lanes] become weights; shares [lanes]: what they are to be multiplied with */
static inline void soften(float *scores, long columns, float *shares, const int vecs) {
    for (int v = 0; v < vecs; v++) {
        vec most = (vec){0} - INFINITY, total = (vec){0};
        for (long c = 0; c < columns; c++) {
            vec at = load_f32(scores + (c * vecs + v) * LANES);
            ints more = at > most;
            most = (vec)(((ints)at & more) | ((ints)most & ~more));
        }
        for (long c = 0; c < columns; c++) {
            float *at = scores + (c * vecs + v) * LANES;
            vec weight = exponential(load_f32(at) - most);
            total += weight;
            memcpy(at, &weight, sizeof weight);
        }
        total = 1.0f / total;
        memcpy(shares + v * LANES, &total, sizeof total);
    }
}

/* mixed [dim, lanes] += values [columns, dim], weighted [columns, lanes] */
static inline __attribute__((always_inline)) void mix(const float *weights, const float *values,
                                                      long stride, long columns, long dim,
                                                      float *mixed, const int vecs) {
    for (long d = 0; d < dim; d += GROUP) {
        long count = dim - d < GROUP ? dim - d : GROUP;
        float sums[GROUP][PANEL];
        switch (count) { EACH(MIX, vecs) }
        for (long n = 0; n < count; n++)
            for (long lane = 0; lane < vecs * LANES; lane++)
                mixed[(d + n) * vecs * LANES + lane] += sums[n][lane];
    }
}

/* by(left, some cells of `from`, right), run by run of the cells of row b */
#define BY_RUN(T, by, from, left, right)                                                           \
    for (long c = 0; c < columns; c += RUN) {                                                      \
        long run = columns - c < RUN ? columns - c : RUN;                                          \
        const float *some_cells = widened_##T(from + (r->first[b] + c) * cell + head * dim, cell,  \
                                              run, dim, wide);                                     \
        if (lanes == LANES)                                                                        \
            by(left, some_cells, stride, run, dim, right, 1);                                      \
        else                                                                                       \
            by(left, some_cells, stride, run, dim, right, VECS);                                   \
    }

/* What a batch of new tokens reads: `rows` rows of `width` places; token of each place (-1: none; null:
   its own number); cells first[b] .. first[b] + count[b] - 1 for row b; to each score a number of mask
   [rows, width, count] is added, rows and places `mask_row` and `mask_place` apart; null: none. */
typedef struct {
    long rows, width;
    const int64_t *tokens, *first, *count;
    const void *mask;
    long mask_row, mask_place;
} reads;

/* out [tokens, key_heads * groups, dim] of keys and values [cells, key_heads, dim]. A token's queries
   [key_heads * groups, dim] lie together, tokens `query_stride` apart. */
#define ATTEND(T)                                                                                  \
    static void attend_##T##_team(const reads *r, const T *query, long query_stride,               \
                                  const T *keys, const T *values, T *out, long key_heads,          \
                                  long groups, long dim, float scale) {                            \
        const T *mask = r->mask;                                                                   \
        long most = 0, cell = key_heads * dim, stride = STRIDE_##T(cell, dim);                     \
        for (long b = 0; b < r->rows; b++) most = r->count[b] > most ? r->count[b] : most;         \
        long queries = r->width * groups, parts = (queries + PANEL - 1) / PANEL;                   \
        float *scores = malloc((most * PANEL + 2 * dim * PANEL + RUN * dim) * sizeof(float));      \
        float *asked = scores + most * PANEL, *mixed = asked + dim * PANEL;                        \
        float *wide = mixed + dim * PANEL, shares[PANEL];                                          \
        _Pragma("omp for schedule(dynamic)") for (long job = 0;                                    \
                                                  job < r->rows * key_heads * parts; job++) {      \
            long b = job / (key_heads * parts), head = job / parts % key_heads;                    \
            long from = job % parts * PANEL, columns = r->count[b];                                \
            long some = queries - from < PANEL ? queries - from : PANEL;                           \
            long lanes = some > LANES ? PANEL : LANES, place[PANEL];                               \
            memset(asked, 0, 2 * dim * PANEL * sizeof(float));                                     \
            for (long lane = 0; lane < some; lane++) {                                             \
                long at = b * r->width + (from + lane) / groups;                                   \
                long token = r->tokens ? r->tokens[at] : at;                                       \
                place[lane] = head * groups + (from + lane) % groups;                              \
                const T *asks = query + token * query_stride + place[lane] * dim;                  \
                place[lane] = token < 0 ? -1 : token * key_heads * groups + place[lane];           \
                for (long d = 0; place[lane] >= 0 && d < dim; d++)                                 \
                    asked[d * lanes + lane] = GET_##T(asks + d) * scale;                           \
            }                                                                                      \
            BY_RUN(T, score, keys, asked, scores + c * lanes)                                      \
            for (long lane = 0; mask && lane < some; lane++) {                                     \
                const T *row = mask + b * r->mask_row + (from + lane) / groups * r->mask_place;    \
                for (long c = 0; c < columns; c++) scores[c * lanes + lane] += GET_##T(row + c);   \
            }                                                                                      \
            soften(scores, columns, shares, lanes / LANES);                                        \
            BY_RUN(T, mix, values, scores + c * lanes, mixed)                                      \
            for (long lane = 0; lane < some; lane++)                                               \
                for (long d = 0; place[lane] >= 0 && d < dim; d++)                                 \
                    PUT_##T(out + place[lane] * dim + d, mixed[d * lanes + lane] * shares[lane]);  \
        }                                                                                          \
        free(scores);                                                                              \
    }                                                                                              \
    void attend_##T(const reads *r, const T *query, long query_stride, const T *keys,              \
                    const T *values, T *out, long key_heads, long groups, long dim, float scale) { \
        _Pragma("omp parallel") attend_##T##_team(r, query, query_stride, keys, values, out,       \
                                                  key_heads, groups, dim, scale);                  \
    }

#define STRIDE_float(cell, dim) cell
#define STRIDE_bf16(cell, dim) dim
static inline const float *widened_float(const float *from, long stride, long count, long dim,
                                         float *wide) {
    (void)stride, (void)count, (void)dim, (void)wide;
    return from;
}
static inline const float *widened_bf16(const bf16 *from, long stride, long count, long dim,
                                        float *wide) {
    for (long c = 0; c < count; c++)
        for (long d = 0; d < dim; d++) wide[c * dim + d] = get_bf16(from + c * stride + d);
    return wide;
}

/* One decoder layer; embedding_norm: of what the attention reads beside the hidden state */
typedef struct {
    long heads, key_heads, dim;
    float scale;
    int normed_residual;
    norm input_norm, embedding_norm, mlp_norm, query_norm, key_norm;
    map qkv, out, gate, up, down;
} layer;

/* y [tokens, D] of x and embedding [tokens, D]; phases [tokens, dim], `phase_stride` apart; keys and
   values [cells, key_heads, dim], into whose `cells` [tokens] the new ones go */
#define LAYER(T)                                                                                   \
    void layer_##T(const layer *l, const reads *r, const T *x, const T *embedding, const T *cos,   \
                   const T *sin, long phase_stride, const int64_t *cells, T *keys, T *values,      \
                   T *y, long tokens) {                                                            \
        long width = l->out.out, wide = l->qkv.in, own = l->key_heads * l->dim;                    \
        long inner = l->gate.out, heads = l->heads * l->dim, all = l->qkv.out;                     \
        long most = wide > inner ? wide : inner;                                                   \
        most = most > heads ? most : heads;                                                        \
        float *turned = malloc(turned_size(tokens, most) * sizeof(float));                         \
        T *read = malloc(tokens * (wide + 2 * width + all + heads + 2 * inner) * sizeof(T));       \
        T *normed = read + tokens * wide, *after = normed + tokens * width;                        \
        T *qkv = after + tokens * width, *mixed = qkv + tokens * all;                              \
        T *gated = mixed + tokens * heads, *product = gated + tokens * inner;                      \
        _Pragma("omp parallel") {                                                                  \
            _Pragma("omp for schedule(static)") for (long n = 0; n < tokens; n++) {                \
                T *first = read + n * wide, *state = first + wide - width;                         \
                if (embedding)                                                                     \
                    rms_norm_of_##T(&l->embedding_norm, embedding + n * width, first, width);      \
                if (l->input_norm.weight)                                                          \
                    rms_norm_of_##T(&l->input_norm, x + n * width, state, width);                  \
                else                                                                               \
                    memcpy(state, x + n * width, width * sizeof(T));                               \
                memcpy(normed + n * width, state, width * sizeof(T));                              \
            }                                                                                      \
            linear_##T##_team(&l->qkv, read, 0, qkv, tokens, NOTHING, turned);                     \
            _Pragma("omp for schedule(static)") for (long n = 0; n < tokens; n++) {                \
                T *query = qkv + n * all, *key = query + heads, *value = key + own;                \
                for (T *at = query; l->query_norm.weight && at < key; at += l->dim)                \
                    rms_norm_of_##T(&l->query_norm, at, at, l->dim);                               \
                for (T *at = key; l->key_norm.weight && at < value; at += l->dim)                  \
                    rms_norm_of_##T(&l->key_norm, at, at, l->dim);                                 \
                rotate_of_##T(query, cos + n * phase_stride, sin + n * phase_stride,               \
                              l->heads + l->key_heads, l->dim);                                    \
                memcpy(keys + cells[n] * own, key, own * sizeof(T));                               \
                memcpy(values + cells[n] * own, value, own * sizeof(T));                           \
            }                                                                                      \
            attend_##T##_team(r, qkv, all, keys, values, mixed, l->key_heads,                      \
                              l->heads / l->key_heads, l->dim, l->scale);                          \
            linear_##T##_team(&l->out, mixed, l->normed_residual ? normed : x, after, tokens, ADD, \
                              turned);                                                             \
            _Pragma("omp for schedule(static)") for (long n = 0; n < tokens; n++)                  \
                rms_norm_of_##T(&l->mlp_norm, after + n * width, normed + n * width, width);       \
            linear_##T##_team(&l->gate, normed, 0, gated, tokens, SILU, turned);                   \
            linear_##T##_team(&l->up, normed, gated, product, tokens, MULTIPLY, turned);           \
            linear_##T##_team(&l->down, product, after, y, tokens, ADD, turned);                   \
        }                                                                                          \
        free(read);                                                                                \
        free(turned);                                                                              \
    }

FINISH(float)
FINISH(bf16)
LINEAR(float, float)
LINEAR(bf16, float)
LINEAR(bf16, bf16)
#define KERNELS(T) MAPS(T) RMS_NORM(T) ROTATE(T) ATTEND(T) LAYER(T)
KERNELS(float)
KERNELS(bf16)
