// The kernel of multi_lora_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "multi_lora_linear/cpu/linear_with_adapters.h"

template <class T, class W, class P>
static void MultiLoraLinear(const T* x, const Product<const W*, T, P>& product, int64_t tokens, int64_t in, int threads)
{
    const std::vector<PlainRows<W>> weights{{product.weight, product.out, in}};
    LinearWithAdapters(weights, std::vector{product}, x, tokens, in, threads);
}
