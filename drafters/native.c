/* Kernels for decoding: a linear map of a handful of tokens is bound by reading its weights once, and
   everything else by the number of calls it takes. Compiled at first use by native.py for the
   machine at hand.

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

#define MAP(W, count)                                                                              \
    case count:                                                                                    \
        sums_##W(panel, ahead, step, turned + first * deep, count, 1, deep, sums, count, VECS);    \
        break;

/* y [tokens, out] = then(x [tokens, in] weight^T + bias, other [tokens, out]); a page of tokens */
#define LINEAR(W, T)                                                                               \
    static void page_##W##_##T(const W *weight, const T *bias, const T *x, const T *other, T *y,   \
                               long tokens, long in, long out, int then) {                         \
        long groups = (tokens + GROUP - 1) / GROUP, size = (tokens + groups - 1) / groups;         \
        long panels = (out + PANEL - 1) / PANEL, step = (PANEL + groups - 1) / groups;             \
        long deep = (in + DEPTH_##W - 1) / DEPTH_##W * DEPTH_##W;                                  \
        float *turned = malloc(tokens * deep * sizeof(float)); /* groups of [deep, size] */        \
        _Pragma("omp parallel") {                                                                  \
            _Pragma("omp for schedule(static)") for (long n = 0; n < tokens; n++) {                \
                long first = n - n % size;                                                         \
                long count = tokens - first < size ? tokens - first : size;                        \
                float *to = turned + first * deep + n - first;                                     \
                for (long k = 0; k < in; k++) to[k * count] = GET_##T(x + n * in + k);             \
                if (in < deep) to[in * count] = 0;                                                 \
            }                                                                                      \
            _Pragma("omp for schedule(static)") for (long p = 0; p < panels; p++) {                \
                const W *panel = weight + p * deep * PANEL, *ahead = panel + deep * PANEL;         \
                long row = p * PANEL, rows = out - row < PANEL ? out - row : PANEL;                \
                for (long first = 0; first < tokens; first += size, ahead += deep * step) {        \
                    long count = tokens - first < size ? tokens - first : size;                    \
                    float sums[GROUP][PANEL];                                                      \
                    switch (count) { EACH(MAP, W) }                                                \
                    for (long n = 0; n < count; n++) {                                             \
                        long place = (first + n) * out + row;                                      \
                        finish_##T(sums[n], rows, bias ? bias + row : 0,                           \
                                   other ? other + place : 0, then, y + place);                    \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        free(turned);                                                                              \
    }                                                                                              \
    void linear_##W##_##T(const W *weight, const T *bias, const T *x, const T *other, T *y,        \
                          long tokens, long in, long out, int then) {                              \
        for (long n = 0; n < tokens; n += PAGE)                                                    \
            page_##W##_##T(weight, bias, x + n * in, other ? other + n * out : 0, y + n * out,     \
                           tokens - n < PAGE ? tokens - n : PAGE, in, out, then);                  \
    }

/* y [tokens, width] = x / rms(x) * weight */
#define RMS_NORM(T)                                                                                \
    void rms_norm_##T(const T *weight, const T *x, T *y, long tokens, long width, float epsilon) { \
        _Pragma("omp parallel for if (tokens > MANY)") for (long n = 0; n < tokens; n++) {         \
            const T *from = x + n * width;                                                         \
            T *to = y + n * width;                                                                 \
            vec lanes = (vec){0};                                                                  \
            long k = 0;                                                                            \
            for (; k + LANES <= width; k += LANES) lanes += LOAD_##T(from + k) * LOAD_##T(from + k);\
            float squares = sum(lanes);                                                            \
            for (; k < width; k++) squares += GET_##T(from + k) * GET_##T(from + k);               \
            float scale = 1.0f / sqrtf(squares / width + epsilon);                                 \
            for (long i = 0; i < width; i++)                                                       \
                PUT_##T(to + i, GET_##T(from + i) * scale * GET_##T(weight + i));                  \
        }                                                                                          \
    }

/* x [tokens, heads, width], tokens `stride` apart, turned in place; cosine and sine [tokens, width],
   tokens `phase_stride` apart, the sine's first half negated */
#define ROTATE(T)                                                                                  \
    void rotate_##T(T *x, long stride, const T *cosine, const T *sine, long phase_stride,          \
                    long tokens, long heads, long width) {                                         \
        long half = width / 2;                                                                     \
        _Pragma("omp parallel for if (tokens > MANY)") for (long n = 0; n < tokens; n++) {         \
            const T *cos = cosine + n * phase_stride, *sin = sine + n * phase_stride;              \
            for (long h = 0; h < heads; h++) {                                                     \
                T *low = x + n * stride + h * width, *high = low + half;                           \
                for (long d = 0; d < half; d++) {                                                  \
                    float a = GET_##T(low + d), b = GET_##T(high + d);                             \
                    PUT_##T(low + d, a * GET_##T(cos + d) + b * GET_##T(sin + d));                 \
                    PUT_##T(high + d,                                                              \
                            b * GET_##T(cos + half + d) + a * GET_##T(sin + half + d));            \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
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
        const float *some_cells = widened_##T(from + (first[b] + c) * cell + head * dim, cell,     \
                                              run, dim, wide);                                     \
        if (lanes == LANES)                                                                        \
            by(left, some_cells, stride, run, dim, right, 1);                                      \
        else                                                                                       \
            by(left, some_cells, stride, run, dim, right, VECS);                                   \
    }

/* out [rows * width, key_heads * groups, dim]: the `width` tokens of row b read cells first[b] ..
   first[b] + count[b] - 1 of keys and values [cells, key_heads, dim], and to each score a number of
   mask [rows, width, count] is added, rows and tokens `mask_row` and `mask_token` apart; null: none.
   A token's queries [key_heads * groups, dim] lie together, tokens `query_stride` apart. */
#define ATTEND(T)                                                                                  \
    void attend_##T(const T *query, long query_stride, const T *keys, const T *values,             \
                    const int64_t *first, const int64_t *count, const T *mask, long mask_row,      \
                    long mask_token, T *out, long rows, long width, long key_heads, long groups,   \
                    long dim, float scale) {                                                       \
        long most = 0, cell = key_heads * dim, stride = STRIDE_##T(cell, dim);                     \
        for (long b = 0; b < rows; b++) most = count[b] > most ? count[b] : most;                  \
        long queries = width * groups, lanes = queries > LANES ? PANEL : LANES;                    \
        long parts = (queries + lanes - 1) / lanes;                                                \
        _Pragma("omp parallel") {                                                                  \
            float *scores = malloc((most * PANEL + 2 * dim * PANEL + RUN * dim) * sizeof(float));  \
            float *asked = scores + most * PANEL, *mixed = asked + dim * PANEL;                    \
            float *wide = mixed + dim * PANEL, shares[PANEL];                                      \
            _Pragma("omp for schedule(dynamic)") for (long job = 0;                                \
                                                      job < rows * key_heads * parts; job++) {     \
                long b = job / (key_heads * parts), head = job / parts % key_heads;                \
                long from = job % parts * lanes, columns = count[b];                               \
                long some = queries - from < lanes ? queries - from : lanes;                       \
                memset(asked, 0, 2 * dim * PANEL * sizeof(float));                                 \
                for (long lane = 0; lane < some; lane++) {                                         \
                    long token = b * width + (from + lane) / groups;                               \
                    long place = head * groups + (from + lane) % groups;                           \
                    const T *at = query + token * query_stride + place * dim;                      \
                    for (long d = 0; d < dim; d++)                                                 \
                        asked[d * lanes + lane] = GET_##T(at + d) * scale;                         \
                }                                                                                  \
                BY_RUN(T, score, keys, asked, scores + c * lanes)                                  \
                for (long lane = 0; mask && lane < some; lane++) {                                 \
                    const T *row = mask + b * mask_row + (from + lane) / groups * mask_token;      \
                    for (long c = 0; c < columns; c++) scores[c * lanes + lane] += GET_##T(row + c);\
                }                                                                                  \
                soften(scores, columns, shares, lanes / LANES);                                    \
                BY_RUN(T, mix, values, scores + c * lanes, mixed)                                  \
                for (long lane = 0; lane < some; lane++) {                                         \
                    long token = b * width + (from + lane) / groups;                               \
                    long place = head * groups + (from + lane) % groups;                           \
                    T *to = out + (token * key_heads * groups + place) * dim;                      \
                    for (long d = 0; d < dim; d++)                                                 \
                        PUT_##T(to + d, mixed[d * lanes + lane] * shares[lane]);                   \
                }                                                                                  \
            }                                                                                      \
            free(scores);                                                                          \
        }                                                                                          \
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

#define KERNELS(T) FINISH(T) LINEAR(T, T) RMS_NORM(T) ROTATE(T) ATTEND(T)
KERNELS(float)
KERNELS(bf16)
LINEAR(bf16, float)
