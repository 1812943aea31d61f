// The kernel of rounded_linear. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "multi_lora_linear/cpu/linear_with_adapters.h"
#include "rounded_linear/cpu/rounded_rows.h"

template <class Product>
static void RoundedLinear(const float* x, const std::vector<Product>& products, int64_t tokens, int64_t in, int threads)
{
    std::vector<RoundedRows> weights;
    for (const Product& product : products) weights.push_back({product.weight, product.out, in});
    LinearWithAdapters(weights, products, x, tokens, in, threads);
}
