// The kernel of rounded_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "multi_lora_linear/cpu/linear_with_adapters.h"
#include "rounded_linear/cpu/rounded_rows.h"

template <class P>
static void RoundedLinear(const float* x, const bfloat16* w, const Adapters<P>& adapters, const float* bias,
    int64_t tokens, int64_t in, int64_t out, int threads, float* y)
{
    LinearWithAdapters(RoundedRows{w, out, in}, x, adapters, bias, tokens, in, out, threads, y);
}
