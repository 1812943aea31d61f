// Compiles the file that MINDLORA_KERNEL names once for each instruction set, in namespaces plain, avx2 and avx512,
// each time after simd.h. The source of a kernel is the same for all: only the width of a vector differs.
// Where MINDLORA_KERNEL_HAS_DOTS is defined, a fourth time in avx512_bf16, with MINDLORA_BFLOAT16_DOTS.
// What the kernels include must be included here, before any instruction set is chosen.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu_common/element.h"

#define MINDLORA_BFLOAT16_DOTS 0
#define MINDLORA_WIDTH 4
namespace mindlora {
namespace plain {
#include "cpu_common/simd.h"
#include MINDLORA_KERNEL
}  // namespace plain
}  // namespace mindlora
#undef MINDLORA_WIDTH

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define MINDLORA_WIDTH 8
namespace mindlora {
namespace avx2 {
#include "cpu_common/simd.h"
#include MINDLORA_KERNEL
}  // namespace avx2
}  // namespace mindlora
#undef MINDLORA_WIDTH
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#define MINDLORA_WIDTH 16
namespace mindlora {
namespace avx512 {
#include "cpu_common/simd.h"
#include MINDLORA_KERNEL
}  // namespace avx512
}  // namespace mindlora
#undef MINDLORA_WIDTH
#pragma GCC pop_options

#if defined(MINDLORA_KERNEL_HAS_DOTS)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")
#define MINDLORA_WIDTH 16
#undef MINDLORA_BFLOAT16_DOTS
#define MINDLORA_BFLOAT16_DOTS 1
namespace mindlora {
namespace avx512_bf16 {
#include "cpu_common/simd.h"
#include MINDLORA_KERNEL
}  // namespace avx512_bf16
}  // namespace mindlora
#undef MINDLORA_BFLOAT16_DOTS
#undef MINDLORA_WIDTH
#pragma GCC pop_options
#endif
#endif
