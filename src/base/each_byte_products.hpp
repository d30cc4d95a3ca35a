// Compiles a kernel's body once for each kind of byte products, as base/each_level.hpp does for
// each level: KVZAP_PRODUCTS is the kind's name, KVZAP_LEVEL that of the level whose vectors it
// uses. No include guard: each body includes this file anew.

#define KVZAP_INLINE KVZAP_TARGET static inline __attribute__((always_inline))

#define KVZAP_PRODUCTS portable
#define KVZAP_LEVEL baseline
#define KVZAP_TARGET
#include KVZAP_PRODUCTS_BODY
#undef KVZAP_PRODUCTS
#undef KVZAP_LEVEL
#undef KVZAP_TARGET

#if KVZAP_NEON
#define KVZAP_PRODUCTS neon_dot
#define KVZAP_LEVEL baseline
#define KVZAP_TARGET KVZAP_TARGET_NEON_DOT
#include KVZAP_PRODUCTS_BODY
#undef KVZAP_PRODUCTS
#undef KVZAP_LEVEL
#undef KVZAP_TARGET
#endif

#if KVZAP_X86
#define KVZAP_PRODUCTS avx2
#define KVZAP_LEVEL avx2
#define KVZAP_TARGET KVZAP_TARGET_AVX2
#include KVZAP_PRODUCTS_BODY
#undef KVZAP_PRODUCTS
#undef KVZAP_LEVEL
#undef KVZAP_TARGET

#define KVZAP_PRODUCTS avx512_vnni
#define KVZAP_LEVEL avx512
#define KVZAP_TARGET KVZAP_TARGET_AVX512_VNNI
#include KVZAP_PRODUCTS_BODY
#undef KVZAP_PRODUCTS
#undef KVZAP_LEVEL
#undef KVZAP_TARGET
#endif

#if KVZAP_AVX_VNNI
#define KVZAP_PRODUCTS avx_vnni
#define KVZAP_LEVEL avx2
#define KVZAP_TARGET KVZAP_TARGET_AVX_VNNI
#include KVZAP_PRODUCTS_BODY
#undef KVZAP_PRODUCTS
#undef KVZAP_LEVEL
#undef KVZAP_TARGET
#endif

#undef KVZAP_INLINE
#undef KVZAP_PRODUCTS_BODY
