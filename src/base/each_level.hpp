// Compiles a kernel's body once for each instruction set:
//
//   #define KVZAP_LEVEL_BODY "folder/body.inc"
//   #include "base/each_level.hpp"
//
// For the body, KVZAP_LEVEL is the level's name (of SimdLevel, and for the namespace of what the
// body defines), KVZAP_TARGET the attribute of its functions, and KVZAP_INLINE that of its inline
// ones. A function without it cannot inline the operations of Vec, so the compiler rejects it.
// No include guard: each body includes this file anew.

#define KVZAP_INLINE KVZAP_TARGET static inline __attribute__((always_inline))

#define KVZAP_LEVEL baseline
#define KVZAP_TARGET
#include KVZAP_LEVEL_BODY
#undef KVZAP_LEVEL
#undef KVZAP_TARGET

#if KVZAP_X86
#define KVZAP_LEVEL avx2
#define KVZAP_TARGET KVZAP_TARGET_AVX2
#include KVZAP_LEVEL_BODY
#undef KVZAP_LEVEL
#undef KVZAP_TARGET

#define KVZAP_LEVEL avx512
#define KVZAP_TARGET KVZAP_TARGET_AVX512
#include KVZAP_LEVEL_BODY
#undef KVZAP_LEVEL
#undef KVZAP_TARGET

#define KVZAP_LEVEL avx512_bf16
#define KVZAP_TARGET KVZAP_TARGET_AVX512_BF16
#include KVZAP_LEVEL_BODY
#undef KVZAP_LEVEL
#undef KVZAP_TARGET
#endif

#if KVZAP_NEON
#define KVZAP_LEVEL neon_bf16
#define KVZAP_TARGET KVZAP_TARGET_NEON_BF16
#include KVZAP_LEVEL_BODY
#undef KVZAP_LEVEL
#undef KVZAP_TARGET
#endif

#undef KVZAP_INLINE
#undef KVZAP_LEVEL_BODY
