// The kernel of rounded_linear for a W in NF4. Included by for_each_isa.h, once in the namespace of each instruction
// set.
#include "multi_lora_linear/cpu/linear_with_adapters.h"
#include "nf4_linear/cpu/nf4_decode.h"
#include "rounded_linear/cpu/rounded_rows.h"

#if MINDLORA_BFLOAT16_DOTS
// A block of a row: 32 numbers and 32 more.
struct DecodedBlock {
    __m512bh low, high;

    MINDLORA_MEMBER DecodedBlock(const uint8_t* codes, float absmax)
    {
        // The table twice: the permutes look at five bits.
        const auto half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(Load(kNf4) * absmax));
        const __m512i table = _mm512_broadcast_i64x4(half);
        const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        low = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(code, table));
        high = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(_mm512_srli_epi16(code, 4), table));
    }
};

#endif

// A block of a row, as products in bfloat16 take it.
MINDLORA_INLINE void DecodeRounded(const uint8_t* codes, float absmax, DecodedNumber* to)
{
#if MINDLORA_BFLOAT16_DOTS
    const DecodedBlock block(codes, absmax);
    std::memcpy(to, &block.low, sizeof block.low);
    std::memcpy(to + kBytes, &block.high, sizeof block.high);
#else
    DecodeBlock<true>(codes, absmax, to);
#endif
}

// Rows of the weight, as FewTokens takes them: decoded once for all tokens, kSums rows at a time.
struct RoundedNf4Rows {
    using Token = DecodedRows::Token;
    static constexpr bool kDecoded = true;

    const Nf4& weight;
    int64_t count;

    template <class T>
    MINDLORA_MEMBER static void Pack(const T* x, int64_t length, Token* to)
    {
        DecodedRows::Pack(x, length, to);
    }

    MINDLORA_MEMBER int64_t Row(int64_t row) const { return std::min(row, count - 1) * weight.blocks; }
    MINDLORA_MEMBER const void* At(int64_t row) const { return weight.codes + Row(row) * kBytes; }

    // The codes of a part of a row, and its absmax. Asks for those of kSums rows later.
    MINDLORA_MEMBER const uint8_t* ReadBlocks(
        int64_t row, int64_t start, int64_t blocks, Ahead* ahead, float* absmax) const
    {
        const int64_t at = Row(row) + start;
        ReadAbsmax(weight, at, blocks, absmax);
        if (ahead != nullptr) {
            ahead->Ask(blocks * kBytes);
            __builtin_prefetch(weight.absmax + Row(row + kSums) + start);
        }
        return weight.codes + at * kBytes;
    }
};

constexpr int64_t kDeepNumbers = kDeep<DecodedNumber>, kDeepBlocks = kDeepNumbers / kBlock;

#if MINDLORA_BFLOAT16_DOTS
// As AddBlock: the products of M tokens and rows from block `start` on, which are decoded in registers.
template <int M>
static __attribute__((noinline)) void AddDecoding(const RoundedNf4Rows& w, const bfloat16* x, int64_t first,
    int64_t start, int64_t blocks, bool begins, Ahead* ahead, float* sums)
{
    // So many rows together as hide how long an addition takes, and leave registers for decoding.
    constexpr int kJ = M <= 4 ? 4 : 2;
    for (int64_t n = 0; n < kSums; n += kJ) {
        const uint8_t* codes[kJ];
        float absmax[kJ][kDeepBlocks];
        Vec acc[M][kJ];
        for (int j = 0; j < kJ; ++j) codes[j] = w.ReadBlocks(first + n + j, start, blocks, ahead, absmax[j]);
        for (int m = 0; m < M; ++m) {
            for (int j = 0; j < kJ; ++j) acc[m][j] = begins ? Vec{} : Load(sums + (m * kSums + n + j) * kWidth);
        }
        for (int64_t b = 0; b < blocks; ++b) {
            __m512bh low[kJ], high[kJ];
            for (int j = 0; j < kJ; ++j) {
                const DecodedBlock block(codes[j] + b * kBytes, absmax[j][b]);
                low[j] = block.low;
                high[j] = block.high;
            }
            DotRows::AddProducts<M, kJ>(x + b * kBlock, low, acc);
            DotRows::AddProducts<M, kJ>(x + b * kBlock + kBytes, high, acc);
        }
        for (int m = 0; m < M; ++m) {
            for (int j = 0; j < kJ; ++j) Store(acc[m][j], sums + (m * kSums + n + j) * kWidth);
        }
    }
}
#endif

// As that of few_tokens.h.
MINDLORA_INLINE void AddTokens(const RoundedNf4Rows& w, const RoundedNf4Rows::Token* x, int64_t tokens, int64_t first,
    int64_t from, int64_t depth, bool begins, Ahead* ahead, float* sums)
{
    const int64_t start = from / kBlock, blocks = (depth + kBlock - 1) / kBlock;
#if MINDLORA_BFLOAT16_DOTS
    if (tokens <= kTogether) {
        return WithTokens(tokens, [&](auto constant) {
            AddDecoding<decltype(constant)::value>(w, x, first, start, blocks, begins, ahead, sums);
        });
    }
#endif
    static thread_local std::vector<float> buffer;
    auto* decoded = reinterpret_cast<DecodedNumber*>(Scratch(&buffer, kSums * kDeepNumbers));
    for (int64_t j = 0; j < kSums; ++j) {
        float absmax[kDeepBlocks];
        const uint8_t* codes = w.ReadBlocks(first + j, start, blocks, ahead, absmax);
        for (int64_t b = 0; b < blocks; ++b) {
            DecodeRounded(codes + b * kBytes, absmax[b], decoded + j * kDeepNumbers + b * kBlock);
        }
    }
    AddTokens(DecodedRows{decoded, kSums, kDeepNumbers}, x, tokens, 0, 0, depth, begins, nullptr, sums);
}

template <class Product>
static void RoundedNf4Linear(
    const float* x, const std::vector<Product>& products, int64_t tokens, int64_t in, int threads)
{
    std::vector<RoundedNf4Rows> weights;
    for (const Product& product : products) weights.push_back({product.weight, product.out});
    LinearWithAdapters(weights, products, x, tokens, in, threads);
}
