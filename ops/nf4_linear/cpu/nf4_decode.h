// NF4 back to float32. Included by the kernels, once in the namespace of each instruction set: no include guard.
// A block of 64 weights of a row is 32 bytes: byte i holds weight i in its low half and weight 32 + i in its high one,
// so that kWidth bytes are two whole vectors of weights. See mindlora/core/numerics/nf4.py.

constexpr int64_t kBlock = 64, kBytes = kBlock / 2;

// Dettmers et al., QLoRA, 2023: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
alignas(64) static const float kNf4[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f,
    0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
    0.7229568362236023f, 1.0f};

// absmax = offset + scale * code for `count` blocks from block `first` of the whole weight.
MINDLORA_INLINE void ReadAbsmax(const Nf4& w, int64_t first, int64_t count, float* to)
{
    // Those of a part of a row, as a product of few tokens takes it: vectors, where the loops below would be longer
    // than the decoding.
    constexpr int64_t kPart = 8;
    const int shift = __builtin_ctzll(w.group);  // it is a power of two
    if (count % kPart == 0 && first >> shift == (first + count - 1) >> shift) {
        const float scale = w.scales[first >> shift], offset = w.offsets[first >> shift];
        for (int64_t part = 0; part < count; part += kPart) {
            for (int i = 0; i < kPart; ++i) to[part + i] = offset + scale * w.absmax[first + part + i];
        }
        return;
    }
    for (int64_t i = 0; i < count;) {
        const int64_t group = (first + i) >> shift, end = std::min(count, ((group + 1) << shift) - first);
        const float scale = w.scales[group], offset = w.offsets[group];
        for (; i < end; ++i) to[i] = offset + scale * w.absmax[first + i];
    }
}

// The table times the absmax of a block: 16 multiplications at most for 64 weights.
struct Table {
#if MINDLORA_WIDTH == 16
    Vec values;
    explicit MINDLORA_MEMBER Table(float absmax) : values(Load(kNf4) * absmax) {}
    MINDLORA_MEMBER void Round() { values = RoundedToBfloat16(values); }
    MINDLORA_MEMBER Vec At(Lanes code) const
    {
        return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(code), values);  // looks at four bits only
    }
#elif MINDLORA_WIDTH == 8
    Vec low, high;
    explicit MINDLORA_MEMBER Table(float absmax) : low(Load(kNf4) * absmax), high(Load(kNf4 + 8) * absmax) {}
    MINDLORA_MEMBER void Round() { low = RoundedToBfloat16(low), high = RoundedToBfloat16(high); }
    MINDLORA_MEMBER Vec At(Lanes code) const
    {
        // The permutes look at three bits, the blend at the sign: the fourth bit is moved there.
        const __m256i at = reinterpret_cast<__m256i>(code);
        return _mm256_blendv_ps(
            _mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at), reinterpret_cast<Vec>(code << 28));
    }
#else
    float values[16];
    explicit MINDLORA_MEMBER Table(float absmax)
    {
        for (int i = 0; i < 16; ++i) values[i] = kNf4[i] * absmax;
    }
    MINDLORA_MEMBER void Round()
    {
        for (int i = 0; i < 16; i += kWidth) Store(RoundedToBfloat16(Load(values + i)), values + i);
    }
    MINDLORA_MEMBER Vec At(Lanes code) const
    {
        Vec v;
        for (int i = 0; i < kWidth; ++i) v[i] = values[code[i] & 15];
        return v;
    }
#endif
};

// With kRounds each number is rounded to bfloat16, in the table.
template <bool kRounds = false>
MINDLORA_INLINE void DecodeBlock(const uint8_t* codes, float absmax, float* to)
{
    Table table(absmax);
    if constexpr (kRounds) table.Round();
    for (int i = 0; i < kBytes; i += kWidth) {
        const Lanes code = LoadCodes(codes + i);
        Store(table.At(code), to + i);
        Store(table.At(code >> 4), to + kBytes + i);
    }
}
