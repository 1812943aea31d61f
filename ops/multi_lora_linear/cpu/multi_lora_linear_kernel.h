// The kernel of multi_lora_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "multi_lora_linear/cpu/linear_with_adapters.h"

template <class T, class W, class P>
static void MultiLoraLinear(const T* x, const W* w, const Adapters<P>& adapters, const T* bias, int64_t tokens,
    int64_t in, int64_t out, int threads, T* y)
{
    LinearWithAdapters(PlainRows<W>{w, out, in}, x, adapters, bias, tokens, in, out, threads, y);
}
