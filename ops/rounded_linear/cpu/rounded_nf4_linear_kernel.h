// The kernel of rounded_linear for a W in NF4. Included by for_each_isa.h, once in the namespace of each instruction set.
#include "multi_lora_linear/cpu/linear_with_adapters.h"
#include "nf4_linear/cpu/nf4_decode.h"
#include "rounded_linear/cpu/rounded_rows.h"

// A block of a row, as products in bfloat16 take it.
MINDLORA_INLINE void DecodeRounded(const uint8_t* codes, float absmax, DecodedNumber* to)
{
#if MINDLORA_BFLOAT16_DOTS
    // The table twice: the permutes look at five bits.
    const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(Load(kNf4) * absmax));
    const __m512i table = _mm512_broadcast_i64x4(half);
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(code, table));
    _mm512_storeu_si512(to + kBytes, _mm512_permutexvar_epi16(_mm512_srli_epi16(code, 4), table));
#else
    DecodeBlock(codes, absmax, to);
    for (int64_t i = 0; i < kBlock; i += kWidth) Store(RoundedToBfloat16(Load(to + i)), to + i);
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
};

// As that of few_tokens.h.
MINDLORA_INLINE void AddTokens(const RoundedNf4Rows& w, const RoundedNf4Rows::Token* x, int64_t tokens, int64_t first,
    int64_t from, int64_t depth, Ahead* ahead, float* sums)
{
    constexpr int64_t kBlocks = kDeep / kBlock;
    static thread_local std::vector<float> buffer;
    auto* decoded = reinterpret_cast<DecodedNumber*>(Scratch(&buffer, kSums * kDeep));
    const int64_t start = from / kBlock, blocks = (depth + kBlock - 1) / kBlock;
    for (int64_t j = 0; j < kSums; ++j) {
        const int64_t at = w.Row(first + j) + start;
        float absmax[kBlocks];
        ReadAbsmax(w.weight, at, blocks, absmax);
        if (ahead != nullptr) ahead->Ask(blocks * kBytes);
        for (int64_t b = 0; b < blocks; ++b) {
            DecodeRounded(w.weight.codes + (at + b) * kBytes, absmax[b], decoded + j * kDeep + b * kBlock);
        }
    }
    AddTokens(DecodedRows{decoded, kSums, kDeep}, x, tokens, 0, 0, depth, nullptr, sums);
}

template <class P>
static void RoundedNf4Linear(const float* x, const Nf4& w, const Adapters<P>& adapters, const float* bias,
    int64_t tokens, int64_t in, int64_t out, int threads, float* y)
{
    LinearWithAdapters(RoundedNf4Rows{w, out}, x, adapters, bias, tokens, in, out, threads, y);
}
