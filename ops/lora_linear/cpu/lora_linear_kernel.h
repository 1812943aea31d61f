// The kernel of lora_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "lora_linear/cpu/lora_linear_few.h"
#include "lora_linear/cpu/lora_linear_many.h"

template <class T>
static void LoraLinear(const T* x, const T* w, const T* a, const T* b, float scale, const T* bias, int64_t tokens,
    int64_t in, int64_t out, int64_t rank, int threads, T* y)
{
    if (tokens == 0 || out == 0) return;
    // A small layer is finished before a second thread wakes up.
    const int64_t chunk = out * in < 1 << 16 ? out : std::max<int64_t>(16, out / (8 * threads) / 16 * 16);
    if (tokens <= kFewTokens) {
        WithRows(tokens, [&](auto rows) {
            LoraLinearOfFew<decltype(rows)::value>(x, w, a, b, scale, bias, in, out, rank, chunk, threads, y);
        });
        return;
    }
    for (int64_t t = 0; t < tokens; t += kManyTokens) {
        const int64_t count = std::min(kManyTokens, tokens - t);
        // As many sums as hide how long an addition takes and fit in the registers.
        if (kWidth == 16 || count <= kWidth) {
            LoraLinearOfMany<8, 1>(x + t * in, w, a, b, scale, bias, count, in, out, rank, chunk, threads, y + t * out);
        } else {
            LoraLinearOfMany<4, 2>(x + t * in, w, a, b, scale, bias, count, in, out, rank, chunk, threads, y + t * out);
        }
    }
}
