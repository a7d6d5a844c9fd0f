/* Sums and what else combines two contributions, element by element, to the bits that torch gives: but for which
   NaN comes of one, and which zero is the extreme of two with different signs.

   Integers wrap around. float16 and bfloat16 are computed in float32 and rounded once, to nearest, ties to
   even. A NaN in either operand makes the minimum and the maximum NaN. */

#include <string.h>

#include "native.h"

/* Every loop is there once as any processor of this kind runs it, and on x86-64 once more, as `..._wide`, for
   those with AVX2 and F16C; the bits are the same. Which are called is found out once, when the library is
   loaded. (GCC's `target_clones` does so, too, but neither with clang nor without glibc.) */
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define WIDE __attribute__((target("avx2,f16c")))
#define LOOP(name, type, expression)       \
    ONE_LOOP(name, , type, expression)     \
    ONE_LOOP(name##_wide, WIDE, type, expression)
#else
#define LOOP(name, type, expression) ONE_LOOP(name, , type, expression)
#endif

#define LOOSE __attribute__((aligned(1), may_alias)) /* addresses need not be aligned */
typedef uint8_t LOOSE u8;
typedef int8_t LOOSE i8;
typedef uint32_t LOOSE u32;
typedef int32_t LOOSE i32;
typedef uint64_t LOOSE u64;
typedef int64_t LOOSE i64;
typedef float LOOSE f32;
typedef double LOOSE f64;
typedef uint16_t LOOSE u16;

#if defined(__clang__)
#define NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_OVERLAP _Pragma("GCC ivdep")
#endif

#define ONE_LOOP(name, processor, type, expression)                                      \
    processor static void name(void *out, const void *a, const void *b, int64_t count) { \
        type *result = out;                                                              \
        const type *first = a, *second = b;                                              \
        NO_OVERLAP for (int64_t i = 0; i < count; i++) {                                 \
            type x = first[i], y = second[i];                                            \
            result[i] = (type)(expression);                                              \
        }                                                                                \
    }

/* Whether the first is the minimum (maximum), rather than the second: of zeros with different signs it is not. */
#define IS_LESS(x, y) (((x) != (x)) | ((x) < (y)))
#define IS_MORE(x, y) (((x) != (x)) | ((x) > (y)))

/* Signed integers are added and multiplied as unsigned ones: the same bits, and C knows what overflow is. */
#define INTEGERS(name, type, unsigned_type)                     \
    LOOP(add_##name, unsigned_type, x + y)                      \
    LOOP(mul_##name, unsigned_type, (uint64_t)x * (uint64_t)y)  \
    LOOP(min_##name, type, x < y ? x : y)                       \
    LOOP(max_##name, type, x > y ? x : y)                       \
    LOOP(and_##name, unsigned_type, x & y)                      \
    LOOP(or_##name, unsigned_type, x | y)                       \
    LOOP(xor_##name, unsigned_type, x ^ y)

#define FLOATS(name, type)              \
    LOOP(add_##name, type, x + y)       \
    LOOP(mul_##name, type, x *y)        \
    LOOP(min_##name, type, IS_LESS(x, y) ? x : y) \
    LOOP(max_##name, type, IS_MORE(x, y) ? x : y)

INTEGERS(u8, u8, u8)
INTEGERS(i8, i8, u8)
INTEGERS(i32, i32, u32)
INTEGERS(i64, i64, u64)
FLOATS(f32, f32)
FLOATS(f64, f64)

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#define WIDE16(x) of_bits((uint32_t)(x) << 16)

static inline uint16_t narrow16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7fc0 : (uint16_t)rounded;
}

LOOP(add_bf16, u16, narrow16(WIDE16(x) + WIDE16(y)))
LOOP(mul_bf16, u16, narrow16(WIDE16(x) * WIDE16(y)))
LOOP(min_bf16, u16, IS_LESS(WIDE16(x), WIDE16(y)) ? x : y)
LOOP(max_bf16, u16, IS_MORE(WIDE16(x), WIDE16(y)) ? x : y)

#if defined(__aarch64__)

typedef __fp16 LOOSE f16; /* computed in float32 by the language, with instructions for both conversions */
FLOATS(f16, f16)

#else

/* The exponent of a float32 is 112 more, but of infinities and NaNs; a subnormal is what 2^-14 and it are beyond
   2^-14, which holds where processors take subnormals of float32 for zeros, too. Without branches, so that the
   compiler makes vectors of it: its own float16 goes through a call for each element. */
static inline float wide_half(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t small = bits_of(of_bits(magnitude + 0x38800000) - of_bits(0x38800000));
    uint32_t finite = half & 0x7c00 ? magnitude + 0x38000000 : small;
    uint32_t wide = (half & 0x7c00) == 0x7c00 ? 0x7f800000 | magnitude : finite;
    return of_bits(wide | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t narrow_half(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
    uint32_t small = bits_of(of_bits(magnitude) + 0.5f) - 0x3f000000; /* the sum rounds at 2^-24 */
    uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t half = magnitude < 0x38800000 ? small : magnitude >= 0x47800000 ? large : normal;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

ONE_LOOP(add_f16, , u16, narrow_half(wide_half(x) + wide_half(y)))
ONE_LOOP(mul_f16, , u16, narrow_half(wide_half(x) * wide_half(y)))
ONE_LOOP(min_f16, , u16, IS_LESS(wide_half(x), wide_half(y)) ? x : y)
ONE_LOOP(max_f16, , u16, IS_MORE(wide_half(x), wide_half(y)) ? x : y)

#endif

#if defined(__x86_64__)

enum { HALVES = 8 }; /* in a vector of float32 */

/* `expression` is of vectors x and y of float32. What is left behind the last whole vector goes the same way. */
#define HALF_LOOP(name, expression)                                                      \
    WIDE static void name(void *out, const void *a, const void *b, int64_t count) {      \
        uint16_t rest[3][HALVES] = {{0}};                                                \
        u16 *result = out;                                                               \
        const u16 *first = a, *second = b;                                               \
        for (int64_t i = 0; i < count; i += HALVES) {                                    \
            int64_t left = count - i;                                                    \
            const u16 *from = first + i, *with = second + i;                             \
            u16 *into = result + i;                                                      \
            if (left < HALVES) {                                                         \
                from = memcpy(rest[0], from, (size_t)left * sizeof *from);               \
                with = memcpy(rest[1], with, (size_t)left * sizeof *with);               \
                into = rest[2];                                                          \
            }                                                                            \
            __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));          \
            __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)with));          \
            __m128i narrow = _mm256_cvtps_ph(expression, _MM_FROUND_TO_NEAREST_INT);     \
            _mm_storeu_si128((__m128i *)into, narrow);                                   \
            if (left < HALVES)                                                           \
                memcpy(result + i, into, (size_t)left * sizeof *into);                   \
        }                                                                                \
    }

/* The processor's extreme of x and y is y where one of them is NaN, or both are zeros. */
#define EXTREME(extreme, x, y) _mm256_blendv_ps(extreme(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q))

HALF_LOOP(add_f16_wide, _mm256_add_ps(x, y))
HALF_LOOP(mul_f16_wide, _mm256_mul_ps(x, y))
HALF_LOOP(min_f16_wide, EXTREME(_mm256_min_ps, x, y))
HALF_LOOP(max_f16_wide, EXTREME(_mm256_max_ps, x, y))

#endif

#define INTEGER_ROW(name) \
    { add_##name, mul_##name, min_##name, max_##name, and_##name, or_##name, xor_##name }
#define FLOAT_ROW(name) \
    { add_##name, mul_##name, min_##name, max_##name, NULL, NULL, NULL }

enum { TYPES = 8, OPERATORS = 7 };

typedef combine *const row[OPERATORS];

static row plain[TYPES] = { /* in the order of `library.py` */
    INTEGER_ROW(u8), INTEGER_ROW(i8), INTEGER_ROW(i32), INTEGER_ROW(i64),
    FLOAT_ROW(f16), FLOAT_ROW(bf16), FLOAT_ROW(f32), FLOAT_ROW(f64),
};
static row *table = plain;

#if defined(__x86_64__)
static row wide[TYPES] = {
    INTEGER_ROW(u8_wide), INTEGER_ROW(i8_wide), INTEGER_ROW(i32_wide), INTEGER_ROW(i64_wide),
    FLOAT_ROW(f16_wide), FLOAT_ROW(bf16_wide), FLOAT_ROW(f32_wide), FLOAT_ROW(f64_wide),
};

__attribute__((constructor)) static void choose(void) {
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C))
        table = wide;
}
#endif

static combine *find_in(row *rows, int32_t type, int32_t operator) {
    if (type < 0 || type >= TYPES || operator < 0 || operator >= OPERATORS)
        return NULL;
    return rows[type][operator];
}

combine *find_combine(int32_t type, int32_t operator) { return find_in(table, type, operator); }

/* For tests, which ask for what any processor runs, too; 0 where there is no such operation. */
int32_t combine_once(int32_t is_plain, int32_t type, int32_t operator, void *out, const void *a, const void *b,
                     int64_t count) {
    combine *function = find_in(is_plain ? plain : table, type, operator);
    if (function != NULL)
        function(out, a, b, count);
    return function != NULL;
}
