// Rows whose products take numbers rounded to bfloat16: tokens here, a weight in NF4 where it is decoded. Sums are
// float32. Included after few_tokens.h, once in the namespace of each instruction set: no include guard.

#if MINDLORA_BFLOAT16_DOTS
// A weight [count, length] of bfloat16, by instructions that multiply 32 numbers and add up each two.
struct DotRows {
    using Token = bfloat16;
    static constexpr bool kDecoded = false;

    const bfloat16* weight;
    int64_t count, length;

    MINDLORA_MEMBER static __m512bh LoadPair(const bfloat16* from)
    {
        __m512bh pair;
        std::memcpy(&pair, from, sizeof pair);
        return pair;
    }

    template <class T>
    MINDLORA_MEMBER static void Pack(const T* x, int64_t length, bfloat16* to)
    {
        for (int64_t p = 0; p < (length + kPadded - 1) / kPadded * kPadded; p += kWidth) {
            Store(p < length ? LoadUpTo(x + p, length - p) : Vec{}, to + p);
        }
    }

    MINDLORA_MEMBER const void* At(int64_t row) const { return weight + std::min(row, count - 1) * length; }

    template <int M, int J>
    MINDLORA_MEMBER static void AddPair(
        const bfloat16* x, const bfloat16* const (&rows)[J], int64_t p, Vec (&acc)[M][J])
    {
        __m512bh row[J];
        for (int j = 0; j < J; ++j) row[j] = LoadPair(rows[j] + p);
        AddProducts<M, J>(x, row, acc);
    }

    // The same for rows that are loaded.
    template <int M, int J>
    MINDLORA_MEMBER static void AddProducts(const bfloat16* x, const __m512bh (&row)[J], Vec (&acc)[M][J])
    {
        for (int m = 0; m < M; ++m) {
            const __m512bh token = LoadPair(x + m * kDeep<bfloat16>);
            for (int j = 0; j < J; ++j) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], token, row[j]);
        }
    }

    // As PlainRows::Add.
    template <int M, int J, class Ask>
    MINDLORA_MEMBER void Add(
        const bfloat16* x, int64_t first, int64_t from, int64_t depth, Vec (&acc)[M][J], Ask ask) const
    {
        const bfloat16* rows[J];
        for (int j = 0; j < J; ++j) rows[j] = weight + std::min(first + j, count - 1) * length + from;
        int64_t p = 0;
        for (; p + kPair <= depth; p += kPair) {
            ask(J * kPair * sizeof(bfloat16));
            AddPair<M, J>(x + p, rows, p, acc);
        }
        if (p == depth) return;
        bfloat16 whole[J][kPair] = {};
        for (int j = 0; j < J; ++j) {
            std::memcpy(whole[j], rows[j] + p, (depth - p) * sizeof(bfloat16));
            rows[j] = whole[j];
        }
        AddPair<M, J>(x + p, rows, 0, acc);
    }
};

using RoundedRows = DotRows;
using DecodedRows = DotRows;
using DecodedNumber = bfloat16;
#else
using RoundedRows = PlainRows<bfloat16, true>;
using DecodedRows = PlainRows<float, true>;
using DecodedNumber = float;
#endif
