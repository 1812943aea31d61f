// Which instruction set the kernels use, decided when the program runs and not when it is compiled.
#pragma once

// Whether the compiler knows AMX, which GCC does from version 11 on.
#if defined(__x86_64__) && __has_include(<amxbf16intrin.h>)
#define MINDLORA_HAS_AMX 1
#else
#define MINDLORA_HAS_AMX 0
#endif

namespace mindlora {

// Each includes those before it. kPlain is what the compiler assumes of any processor of the architecture: SSE2 on
// x86-64, NEON on aarch64, where there is no other. kAvx512Bf16 and kAmxBf16 are for kernels that multiply bfloat16,
// the latter in tiles.
enum Isa : int { kPlain = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmxBf16 = 4 };

// The best instruction set of this processor.
Isa BestIsa();

// The one in use: the best, unless mindlora_set_isa chose another.
Isa CurrentIsa();

}  // namespace mindlora

// Chooses an instruction set for the whole process and returns the one that is then in use: another one if the
// processor lacks the one asked for. For tests and benchmarks.
extern "C" int mindlora_set_isa(int isa);

// The best instruction set of this processor, as a number of Isa.
extern "C" int mindlora_best_isa();

// The version of the entry points: the Python side refuses a library with another version than its own.
extern "C" int mindlora_library_version();

// Calls `function` of the namespace of the instruction set in use.
#if defined(__x86_64__)
#define MINDLORA_DISPATCH(function, ...)                                \
    switch (::mindlora::CurrentIsa()) {                                 \
        case ::mindlora::kAmxBf16:                                      \
        case ::mindlora::kAvx512Bf16:                                   \
        case ::mindlora::kAvx512: avx512::function(__VA_ARGS__); break; \
        case ::mindlora::kAvx2: avx2::function(__VA_ARGS__); break;     \
        default: plain::function(__VA_ARGS__);                          \
    }
// The same for a kernel that is compiled with MINDLORA_KERNEL_HAS_DOTS.
#define MINDLORA_DISPATCH_DOTS(function, ...)                                    \
    switch (::mindlora::CurrentIsa()) {                                          \
        case ::mindlora::kAmxBf16:                                               \
        case ::mindlora::kAvx512Bf16: avx512_bf16::function(__VA_ARGS__); break; \
        case ::mindlora::kAvx512: avx512::function(__VA_ARGS__); break;          \
        case ::mindlora::kAvx2: avx2::function(__VA_ARGS__); break;              \
        default: plain::function(__VA_ARGS__);                                   \
    }
#else
#define MINDLORA_DISPATCH(function, ...) plain::function(__VA_ARGS__)
#define MINDLORA_DISPATCH_DOTS(function, ...) plain::function(__VA_ARGS__)
#endif
