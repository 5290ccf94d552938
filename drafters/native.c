/* Kernels for a handful of tokens: there a linear map is bound by reading its weights once, and
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
#define TILE_ROWS 4
#define TILE_TOKENS 8
#define BLOCK 12 /* output rows a thread takes at a time: tiles of 3 and of 4 fit */

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float vec_any __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));
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

/* dots[r][n] = weight row r . token n, over `rows` x `tokens`; both are constants once inlined.
   Rows lie `stride` apart. */
#define DOTS(T)                                                                                    \
    static inline __attribute__((always_inline)) void dots_##T(                                    \
        const T *weight, long stride, const float *x, long in,                                     \
        float dots[TILE_ROWS][TILE_TOKENS], const int rows, const int tokens) {                    \
        vec acc[TILE_ROWS][TILE_TOKENS];                                                           \
        for (int r = 0; r < rows; r++)                                                             \
            for (int n = 0; n < tokens; n++) acc[r][n] = (vec){0};                                 \
        long k = 0;                                                                                \
        for (; k + LANES <= in; k += LANES) {                                                      \
            vec column[TILE_TOKENS];                                                               \
            for (int n = 0; n < tokens; n++) column[n] = load_f32(x + n * in + k);                 \
            for (int r = 0; r < rows; r++) {                                                       \
                vec w = LOAD_##T(weight + r * stride + k);                                         \
                __builtin_prefetch(weight + (rows + r) * stride + k); /* the next tile's */        \
                for (int n = 0; n < tokens; n++) acc[r][n] += w * column[n];                       \
            }                                                                                      \
        }                                                                                          \
        for (int r = 0; r < rows; r++)                                                             \
            for (int n = 0; n < tokens; n++) {                                                     \
                float rest = 0;                                                                    \
                for (long j = k; j < in; j++)                                                      \
                    rest += GET_##T(weight + r * stride + j) * x[n * in + j];                      \
                dots[r][n] = sum(acc[r][n]) + rest;                                                \
            }                                                                                      \
    }

#define FINISH(T)                                                                                  \
    static inline void finish_##T(float dot, long place, long row, const T *bias, const T *other,  \
                                  int then, T *y) {                                                \
        if (bias) dot += GET_##T(bias + row);                                                      \
        if (then == SILU) dot = dot / (1.0f + expf(-dot));                                         \
        if (then == ADD) dot += GET_##T(other + place);                                            \
        if (then == MULTIPLY) dot *= GET_##T(other + place);                                       \
        PUT_##T(y + place, dot);                                                                   \
    }

#define TILE(W, T, first, rows, tokens)                                                            \
    {                                                                                              \
        float dots[TILE_ROWS][TILE_TOKENS];                                                        \
        dots_##W(weight + row * in, in, x + first * in, in, dots, rows, tokens);                   \
        for (int n = 0; n < tokens; n++)                                                           \
            for (int r = 0; r < rows; r++)                                                         \
                finish_##T(dots[r][n], (first + n) * out + row + r, row + r, bias, other, then, y);\
    }

#define ROWS(W, T, rows, tokens)                                                                   \
    for (; row + rows <= end; row += rows) TILE(W, T, 0, rows, tokens)

/* more tokens than a tile holds, four at a time: the tile's weights stay in the nearest cache */
#define GROUPS(W, T, rows)                                                                         \
    for (; row + rows <= end; row += rows) {                                                       \
        long first = 0;                                                                            \
        for (; first + 4 <= tokens; first += 4) TILE(W, T, first, rows, 4)                         \
        if (tokens - first == 3) TILE(W, T, first, rows, 3)                                        \
        if (tokens - first == 2) TILE(W, T, first, rows, 2)                                        \
        if (tokens - first == 1) TILE(W, T, first, rows, 1)                                        \
    }

/* y [tokens, out] = then(x [tokens, in] weight [out, in]^T + bias, other [tokens, out]) */
#define LINEAR(W, T)                                                                               \
    void linear_##W##_##T(const W *weight, const T *bias, const T *given, const T *other, T *y,    \
                    long tokens, long in, long out, int then) {                                    \
        _Pragma("omp parallel") {                                                                  \
            float *wide = WIDEN_##T ? malloc(tokens * in * sizeof(float)) : 0;                     \
            const float *x = WIDEN_##T ? wide : (const float *)given;                              \
            if (WIDEN_##T)                                                                         \
                for (long i = 0; i < tokens * in; i++) wide[i] = GET_##T(given + i);               \
            _Pragma("omp for schedule(static)") for (long block = 0; block < out; block += BLOCK) {\
                long end = block + BLOCK < out ? block + BLOCK : out;                              \
                long row = block;                                                                  \
                switch (tokens) {                                                                  \
                case 1: ROWS(W, T, 4, 1) ROWS(W, T, 1, 1) break;                                   \
                case 2: ROWS(W, T, 4, 2) ROWS(W, T, 1, 2) break;                                   \
                case 3: ROWS(W, T, 4, 3) ROWS(W, T, 1, 3) break;                                   \
                case 4: ROWS(W, T, 3, 4) ROWS(W, T, 1, 4) break;                                   \
                case 5: ROWS(W, T, 2, 5) ROWS(W, T, 1, 5) break;                                   \
                case 6: ROWS(W, T, 2, 6) ROWS(W, T, 1, 6) break;                                   \
                case 7: ROWS(W, T, 2, 7) ROWS(W, T, 1, 7) break;                                   \
                case 8: ROWS(W, T, 1, 8) break;                                                    \
                default: GROUPS(W, T, 3) GROUPS(W, T, 1)                                           \
                }                                                                                  \
            }                                                                                      \
            free(wide);                                                                            \
        }                                                                                          \
    }

/* y [tokens, width] = x / rms(x) * weight */
#define RMS_NORM(T)                                                                                \
    void rms_norm_##T(const T *weight, const T *x, T *y, long tokens, long width, float epsilon) { \
        for (long n = 0; n < tokens; n++, x += width, y += width) {                                \
            vec lanes = (vec){0};                                                                  \
            long k = 0;                                                                            \
            for (; k + LANES <= width; k += LANES) lanes += LOAD_##T(x + k) * LOAD_##T(x + k);     \
            float squares = sum(lanes);                                                            \
            for (; k < width; k++) squares += GET_##T(x + k) * GET_##T(x + k);                     \
            float scale = 1.0f / sqrtf(squares / width + epsilon);                                 \
            for (long i = 0; i < width; i++)                                                       \
                PUT_##T(y + i, GET_##T(x + i) * scale * GET_##T(weight + i));                      \
        }                                                                                          \
    }

/* x [tokens, heads, width], tokens `stride` apart, turned in place; cosine and sine [tokens, width],
   tokens `phase_stride` apart, the sine's first half negated */
#define ROTATE(T)                                                                                  \
    void rotate_##T(T *x, long stride, const T *cosine, const T *sine, long phase_stride,          \
                    long tokens, long heads, long width) {                                         \
        long half = width / 2;                                                                     \
        for (long n = 0; n < tokens; n++, cosine += phase_stride, sine += phase_stride)            \
            for (long h = 0; h < heads; h++) {                                                     \
                T *low = x + n * stride + h * width, *high = low + half;                           \
                for (long d = 0; d < half; d++) {                                                  \
                    float a = GET_##T(low + d), b = GET_##T(high + d);                             \
                    PUT_##T(low + d, a * GET_##T(cosine + d) + b * GET_##T(sine + d));             \
                    PUT_##T(high + d,                                                              \
                            b * GET_##T(cosine + half + d) + a * GET_##T(sine + half + d));        \
                }                                                                                  \
            }                                                                                      \
    }

/* e^x, within 2 units of the last place; NaN stays NaN */
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
    return (y * r * r + r + 1.0f) * (vec)((whole + 127) << 23);
}

/* Many tokens: arithmetic is what counts. Lanes are tokens, so that nothing is summed across them;
   a weight is widened once for all tokens and met by TURNED of them at a time. */
#define WIDE_ROWS 6
#define WIDE_BLOCK 24 /* output rows a thread takes at a time */
#define TURNED (2 * LANES)
#define RUN 64 /* products summed one after the other: a sum of short sums rounds less */

static inline __attribute__((always_inline)) void panel(
    const float *weight, const float *x, long in, float dots[WIDE_ROWS][TURNED], const int rows,
    const int vecs) {
    vec total[WIDE_ROWS][2] = {{{0}}};
    for (long start = 0; start < in; start += RUN) {
        long stop = start + RUN < in ? start + RUN : in;
        vec acc[WIDE_ROWS][2];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) acc[r][v] = (vec){0};
        for (long k = start; k < stop; k++) {
            vec column[2];
            for (int v = 0; v < vecs; v++) column[v] = *(const vec *)(x + (k * vecs + v) * LANES);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vecs; v++) acc[r][v] += weight[r * in + k] * column[v];
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) total[r][v] += acc[r][v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) memcpy(dots[r] + v * LANES, &total[r][v], sizeof(vec));
}

/* turned: groups of TURNED tokens (the last may hold LANES), each [in, tokens], zeros behind */
static void turn(const float *x, float *turned, long tokens, long in) {
    _Pragma("omp parallel for schedule(static)") for (long first = 0; first < tokens;
                                                      first += TURNED) {
        long wide = tokens - first > LANES ? TURNED : LANES;
        float *to = turned + first * in;
        for (long n = 0; n < wide; n++)
            for (long k = 0; k < in; k++)
                to[k * wide + n] = first + n < tokens ? x[(first + n) * in + k] : 0.0f;
    }
}

static inline void finish_wide(float dots[WIDE_ROWS][TURNED], long first, long count, long row,
                               int rows, long out, const float *bias, const float *other, int then,
                               float *y) {
    for (int r = 0; r < rows; r++) {
        if (bias)
            for (int n = 0; n < TURNED; n++) dots[r][n] += bias[row + r];
        if (then == SILU)
            for (int n = 0; n < TURNED; n += LANES) {
                vec dot = load_f32(dots[r] + n);
                dot = dot / (exponential(-dot) + 1.0f);
                memcpy(dots[r] + n, &dot, sizeof dot);
            }
    }
    for (long n = 0; n < count; n++)
        for (int r = 0; r < rows; r++) {
            long place = (first + n) * out + row + r;
            float dot = dots[r][n];
            if (then == ADD) dot += other[place];
            if (then == MULTIPLY) dot *= other[place];
            y[place] = dot;
        }
}

#define PANELS(W, rows)                                                                               \
    for (; row + rows <= end; row += rows) {                                                       \
        for (long i = 0; wide && i < rows * in; i++) wide[i] = GET_##W(weight + row * in + i);       \
        const float *w = wide ? wide : (const float *)weight + row * in;                           \
        for (long first = 0; first < tokens; first += TURNED) {                                    \
            float dots[WIDE_ROWS][TURNED] = {{0}};                                                 \
            long count = tokens - first < TURNED ? tokens - first : TURNED;                        \
            if (count > LANES)                                                                     \
                panel(w, turned + first * in, in, dots, rows, 2);                                  \
            else                                                                                   \
                panel(w, turned + first * in, in, dots, rows, 1);                                  \
            finish_wide(dots, first, count, row, rows, out, bias, other, then, y);                 \
        }                                                                                          \
    }

/* as linear, over any number of tokens */
#define WIDE(W)                                                                                    \
    void wide_##W(const W *weight, const float *bias, const float *x, const float *other,          \
                  float *y, long tokens, long in, long out, int then) {                            \
        long padded = (tokens + LANES - 1) / LANES * LANES;                                        \
        float *turned = aligned_alloc(64, (padded * in * sizeof(float) + 63) / 64 * 64);           \
        turn(x, turned, tokens, in);                                                               \
        _Pragma("omp parallel") {                                                                  \
            float *wide = WIDEN_##W ? malloc(WIDE_ROWS * in * sizeof(float)) : 0;                  \
            _Pragma("omp for schedule(static)") for (long block = 0; block < out;                  \
                                                     block += WIDE_BLOCK) {                        \
                long end = block + WIDE_BLOCK < out ? block + WIDE_BLOCK : out;                    \
                long row = block;                                                                  \
                PANELS(W, 6) PANELS(W, 1)                                                                         \
            }                                                                                      \
            free(wide);                                                                            \
        }                                                                                          \
        free(turned);                                                                              \
    }

/* weighted values: out[g] += weights[g][c] values[c] over `count` columns `stride` apart, for
   `vecs` vectors of the head from `values` on */
#define MIX(T)                                                                                     \
    static inline __attribute__((always_inline)) void mix_##T(                                     \
        const T *values, long stride, const float *weights, long count, const float *scale, T *out,\
        long dim, const int groups, const int vecs) {                                              \
        vec acc[4][4];                                                                             \
        for (int g = 0; g < groups; g++)                                                           \
            for (int v = 0; v < vecs; v++) acc[g][v] = (vec){0};                                   \
        for (long c = 0; c < count; c++) {                                                         \
            vec column[4];                                                                         \
            for (int v = 0; v < vecs; v++) column[v] = LOAD_##T(values + c * stride + v * LANES);  \
            for (int g = 0; g < groups; g++)                                                       \
                for (int v = 0; v < vecs; v++) acc[g][v] += weights[g * count + c] * column[v];    \
        }                                                                                          \
        for (int g = 0; g < groups; g++)                                                           \
            for (int v = 0; v < vecs; v++)                                                         \
                for (int i = 0; i < LANES; i++)                                                    \
                    PUT_##T(out + g * dim + v * LANES + i, acc[g][v][i] * scale[g]);               \
    }

static float soften(float *scores, long count, float scale) {
    float most = -INFINITY, total = 0;
    for (long c = 0; c < count; c++) {
        scores[c] *= scale;
        most = scores[c] > most ? scores[c] : most;
    }
    long c = 0;
    vec totals = (vec){0};
    for (; c + LANES <= count; c += LANES) {
        vec weight = exponential(load_f32(scores + c) - most);
        totals += weight;
        memcpy(scores + c, &weight, sizeof weight);
    }
    for (; c < count; c++) total += scores[c] = expf(scores[c] - most);
    return sum(totals) + total;
}

/* `groups` (1 to 4) query heads of one token over the columns they share */
#define HEADS(T)                                                                                   \
    static inline __attribute__((always_inline)) void heads_##T(                                   \
        const float *query, const T *keys, const T *values, long stride, long count, long dim,     \
        float scale, float *scores, T *out, const int groups) {                                    \
        float dots[TILE_ROWS][TILE_TOKENS], shares[4];                                             \
        long c = 0;                                                                                \
        for (; c + 4 <= count; c += 4) {                                                           \
            dots_##T(keys + c * stride, stride, query, dim, dots, 4, groups);                      \
            for (int g = 0; g < groups; g++)                                                       \
                for (int r = 0; r < 4; r++) scores[g * count + c + r] = dots[r][g];                \
        }                                                                                          \
        for (; c < count; c++) {                                                                   \
            dots_##T(keys + c * stride, stride, query, dim, dots, 1, groups);                      \
            for (int g = 0; g < groups; g++) scores[g * count + c] = dots[0][g];                   \
        }                                                                                          \
        for (int g = 0; g < groups; g++)                                                           \
            shares[g] = 1.0f / soften(scores + g * count, count, scale);                           \
        long d = 0;                                                                                \
        for (; d + 4 * LANES <= dim; d += 4 * LANES)                                               \
            mix_##T(values + d, stride, scores, count, shares, out + d, dim, groups, 4);           \
        for (; d + LANES <= dim; d += LANES)                                                       \
            mix_##T(values + d, stride, scores, count, shares, out + d, dim, groups, 1);           \
        for (; d < dim; d++)                                                                       \
            for (int g = 0; g < groups; g++) {                                                     \
                float total = 0;                                                                   \
                for (c = 0; c < count; c++)                                                        \
                    total += scores[g * count + c] * GET_##T(values + c * stride + d);             \
                PUT_##T(out + g * dim + d, total * shares[g]);                                     \
            }                                                                                      \
    }

/* out [tokens, key_heads * groups, dim]: token n reads cells first[n] .. first[n] + count[n] - 1 of
   keys and values [cells, key_heads, dim]; its queries [key_heads * groups, dim] lie together,
   tokens `query_stride` apart */
#define ATTEND(T)                                                                                  \
    void attend_##T(const T *query, long query_stride, const T *keys, const T *values,             \
                    const int64_t *first, const int64_t *count, T *out, long tokens,               \
                    long key_heads, long groups, long dim, float scale) {                          \
        long most = 0, stride = key_heads * dim;                                                   \
        for (long n = 0; n < tokens; n++) most = count[n] > most ? count[n] : most;                \
        _Pragma("omp parallel") {                                                                  \
            float *scores = malloc(4 * (most + dim) * sizeof(float)), *asked = scores + 4 * most;  \
            _Pragma("omp for schedule(dynamic)") for (long job = 0; job < tokens * key_heads;      \
                                                      job++) {                                     \
                long n = job / key_heads, head = job % key_heads, columns = count[n];              \
                const T *k = keys + first[n] * stride + head * dim;                                \
                const T *v = values + first[n] * stride + head * dim;                              \
                for (long g = 0; g < groups;) {                                                    \
                    long some = groups - g < 4 ? groups - g : 4, at = (head * groups + g) * dim;   \
                    for (long i = 0; i < some * dim; i++)                                          \
                        asked[i] = GET_##T(query + n * query_stride + at + i);                     \
                    T *to = out + n * key_heads * groups * dim + at;                               \
                    switch (some) {                                                                \
                    case 1: heads_##T(asked, k, v, stride, columns, dim, scale, scores, to, 1);    \
                        break;                                                                     \
                    case 2: heads_##T(asked, k, v, stride, columns, dim, scale, scores, to, 2);    \
                        break;                                                                     \
                    case 3: heads_##T(asked, k, v, stride, columns, dim, scale, scores, to, 3);    \
                        break;                                                                     \
                    default: heads_##T(asked, k, v, stride, columns, dim, scale, scores, to, 4);   \
                    }                                                                              \
                    g += some;                                                                     \
                }                                                                                  \
            }                                                                                      \
            free(scores);                                                                          \
        }                                                                                          \
    }

#define LOAD_float load_f32
#define GET_float get_f32
#define PUT_float put_f32
#define WIDEN_float 0
#define LOAD_bf16 load_bf16
#define GET_bf16 get_bf16
#define PUT_bf16 put_bf16
#define WIDEN_bf16 1

#define KERNELS(T) DOTS(T) FINISH(T) LINEAR(T, T) RMS_NORM(T) ROTATE(T) MIX(T) HEADS(T) ATTEND(T)
KERNELS(float)
KERNELS(bf16)
LINEAR(bf16, float)
WIDE(float)
WIDE(bf16)
