// The product of routed_experts with weights in NF4. Included by for_each_isa.h, once for each instruction set.
#include "nf4_linear/cpu/nf4_decode.h"

// sum[n] += sum_i x[i] rows[i][n] over `count` decoded blocks.
static void AddRows(const float* x, const float* rows, int64_t count, float* sum)
{
    constexpr int kParts = kBlock / kWidth;
    Vec acc[kParts];
    for (int v = 0; v < kParts; ++v) acc[v] = Load(sum + v * kWidth);
    for (int64_t i = 0; i < count; ++i) {
        for (int v = 0; v < kParts; ++v) acc[v] += x[i] * Load(rows + i * kBlock + v * kWidth);
    }
    for (int v = 0; v < kParts; ++v) Store(acc[v], sum + v * kWidth);
}

// The rows of a block that are decoded at a time: half of an L1 cache.
constexpr int64_t kDecoded = 64;

// out[t][n - start] = token[t] . column n of an expert's matrix, for columns start to end of it and `count` tokens.
static void ExpertProduct(const Nf4Experts& all, int64_t expert, const float* const* token, int64_t count,
    int64_t start, int64_t end, float* const* out)
{
    static thread_local std::vector<float> decoded_buffer, sums_buffer;
    float *decoded = Scratch(&decoded_buffer, kDecoded * kBlock), *sums = Scratch(&sums_buffer, count * kBlock);
    const Nf4 w = {all.codes, all.absmax, all.scales, all.offsets, all.blocks, kNf4Group};
    for (int64_t block = start / kBlock; block * kBlock < end; ++block) {
        std::fill(sums, sums + count * kBlock, 0.0f);
        for (int64_t row = 0; row < all.in; row += kDecoded) {
            const int64_t rows = std::min(kDecoded, all.in - row);
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t at = (expert * all.in + row + i) * w.blocks + block;
                float absmax;
                ReadAbsmax(w, at, 1, &absmax);
                // The rows are too far from each other for the processor's own prefetching.
                __builtin_prefetch(w.codes + (at + 8 * w.blocks) * kBytes);
                DecodeBlock(w.codes + at * kBytes, absmax, decoded + i * kBlock);
            }
            for (int64_t t = 0; t < count; ++t) AddRows(token[t] + row, decoded, rows, sums + t * kBlock);
        }
        const int64_t first = std::max(start, block * kBlock), last = std::min(end, (block + 1) * kBlock);
        for (int64_t t = 0; t < count; ++t) {
            const float* from = sums + t * kBlock + first - block * kBlock;
            std::copy(from, from + last - first, out[t] + first - start);
        }
    }
}

#include "routed_experts/cpu/routed_experts_kernel.h"
