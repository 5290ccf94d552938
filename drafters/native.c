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

/* dots[r][n] = weight row r . token n, over `rows` x `tokens`; both are constants once inlined */
#define DOTS(T)                                                                                    \
    static inline __attribute__((always_inline)) void dots_##T(                                    \
        const T *weight, const float *x, long in, float dots[TILE_ROWS][TILE_TOKENS],              \
        const int rows, const int tokens) {                                                        \
        vec acc[TILE_ROWS][TILE_TOKENS];                                                           \
        for (int r = 0; r < rows; r++)                                                             \
            for (int n = 0; n < tokens; n++) acc[r][n] = (vec){0};                                 \
        long k = 0;                                                                                \
        for (; k + LANES <= in; k += LANES) {                                                      \
            vec column[TILE_TOKENS];                                                               \
            for (int n = 0; n < tokens; n++) column[n] = load_f32(x + n * in + k);                 \
            for (int r = 0; r < rows; r++) {                                                       \
                vec w = LOAD_##T(weight + r * in + k);                                             \
                __builtin_prefetch(weight + (rows + r) * in + k); /* the next tile's */            \
                for (int n = 0; n < tokens; n++) acc[r][n] += w * column[n];                       \
            }                                                                                      \
        }                                                                                          \
        for (int r = 0; r < rows; r++)                                                             \
            for (int n = 0; n < tokens; n++) {                                                     \
                float rest = 0;                                                                    \
                for (long j = k; j < in; j++) rest += GET_##T(weight + r * in + j) * x[n * in + j];\
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
        dots_##W(weight + row * in, x + first * in, in, dots, rows, tokens);                       \
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

#define LOAD_float load_f32
#define GET_float get_f32
#define PUT_float put_f32
#define WIDEN_float 0
#define LOAD_bf16 load_bf16
#define GET_bf16 get_bf16
#define PUT_bf16 put_bf16
#define WIDEN_bf16 1

#define KERNELS(T) DOTS(T) FINISH(T) LINEAR(T, T) RMS_NORM(T) ROTATE(T)
KERNELS(float)
KERNELS(bf16)
LINEAR(bf16, float)
