// The product of a few tokens with the rows of a weight, each of which is read once, in the order in which they lie.
// Included by kernels, once in the namespace of each instruction set: no include guard.
//
// A row and a token are multiplied two vectors at a time, and every number of y is one chain of sums over them: it does
// not depend on the tokens beside it, nor on how the loops below cut tokens, rows and K.
//
// The rows are a class with Token, what a number of a token is packed as; Pack, which packs a token in the order in
// which rows are loaded; At, where a row lies; and Add, the products. Rows with kDecoded have an AddTokens of their own
// in place of Add.

constexpr int64_t kPair = 2 * kWidth;
// Sums in registers. What they are multiplied with comes from the L1 cache.
constexpr int kSums = kWidth == 16 ? 24 : 8;
// Tokens that are multiplied together with a row, and how many numbers of each: they stay in the L1 cache.
constexpr int kTogether = 8;
template <class Token>
constexpr int64_t kDeep = 2048 / sizeof(Token);
// Tokens whose sums with kSums rows stay in the L2 cache, and the rows too.
constexpr int64_t kChunk = 64;
// What rows are read in: whole pairs, or whole blocks of NF4.
constexpr int64_t kPadded = 64;

// One of the two vectors of a pair. Those of bfloat16 are its even and its odd places: an instruction less for each.
template <int kHalf, class T>
MINDLORA_INLINE Vec LoadHalf(const T* pair)
{
    return Load(pair + kHalf * kWidth);
}

template <int kHalf>
MINDLORA_INLINE Vec LoadHalf(const bfloat16* pair)
{
    Bits both;
    std::memcpy(&both, pair, sizeof both);
    return reinterpret_cast<Vec>(kHalf == 0 ? both << 16 : both & 0xffff0000);
}

// kDeep numbers of all tokens, then the next kDeep of all: part p of token t is at p * tokens + t * kDeep.
template <class Token>
MINDLORA_INLINE int64_t PackedSize(int64_t tokens, int64_t length)
{
    return (length + kDeep<Token> - 1) / kDeep<Token> * kDeep<Token> * tokens;
}

template <class Rows, class T>
static void PackTokens(const T* x, int64_t tokens, int64_t length, int threads, typename Rows::Token* to)
{
    constexpr int64_t kPart = kDeep<typename Rows::Token>;
    // A few are packed before a second thread wakes up.
#pragma omp parallel for num_threads(threads) if (tokens * length > 1 << 16)
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t p = 0; p < length; p += kPart) {
            Rows::Pack(x + t * length + p, std::min(kPart, length - p), to + p * tokens + t * kPart);
        }
    }
}

// A weight [count, length] of float32, float16 or bfloat16; with kRounds tokens are rounded to bfloat16.
template <class W, bool kRounds = false>
struct PlainRows {
    using Token = float;
    static constexpr bool kDecoded = false;

    const W* weight;
    int64_t count, length;

    // With zeros up to a multiple of kPadded.
    template <class T>
    MINDLORA_MEMBER static void Pack(const T* x, int64_t length, float* to)
    {
        for (int64_t p = 0; p < (length + kPadded - 1) / kPadded * kPadded; p += kPair) {
            Vec first = p < length ? LoadUpTo(x + p, length - p) : Vec{};
            Vec second = p + kWidth < length ? LoadUpTo(x + p + kWidth, length - p - kWidth) : Vec{};
            if constexpr (kRounds) first = RoundedToBfloat16(first), second = RoundedToBfloat16(second);
            if constexpr (std::is_same_v<W, bfloat16>) {
                const Lanes even = EachLane([](int i) { return 2 * i; });
                Store(__builtin_shuffle(first, second, even), to + p);
                Store(__builtin_shuffle(first, second, even + 1), to + p + kWidth);
            } else {
                Store(first, to + p);
                Store(second, to + p + kWidth);
            }
        }
    }

    MINDLORA_MEMBER const void* At(int64_t row) const { return weight + std::min(row, count - 1) * length; }

    template <int M, int J, int kHalf>
    MINDLORA_MEMBER static void AddHalf(const float* x, const W* const (&rows)[J], int64_t p, Vec (&acc)[M][J])
    {
        Vec row[J];
        for (int j = 0; j < J; ++j) row[j] = LoadHalf<kHalf>(rows[j] + p);
        for (int m = 0; m < M; ++m) {
            const Vec token = Load(x + m * kDeep<float> + kHalf * kWidth);
            for (int j = 0; j < J; ++j) acc[m][j] += token * row[j];
        }
    }

    // acc[m][j] += the products of M tokens and row first + j, for `depth` numbers from `from` on. Past the last row it
    // is computed again, and dropped by the caller.
    template <int M, int J, class Ask>
    MINDLORA_MEMBER void Add(
        const float* x, int64_t first, int64_t from, int64_t depth, Vec (&acc)[M][J], Ask ask) const
    {
        const W* rows[J];
        for (int j = 0; j < J; ++j) rows[j] = weight + std::min(first + j, count - 1) * length + from;
        int64_t p = 0;
        for (; p + kPair <= depth; p += kPair) {
            ask(J * kPair * sizeof(W));
            AddHalf<M, J, 0>(x + p, rows, p, acc);
            AddHalf<M, J, 1>(x + p, rows, p, acc);
        }
        if (p == depth) return;
        W whole[J][kPair] = {};
        for (int j = 0; j < J; ++j) {
            std::memcpy(whole[j], rows[j] + p, (depth - p) * sizeof(W));
            rows[j] = whole[j];
        }
        AddHalf<M, J, 0>(x + p, rows, 0, acc);
        AddHalf<M, J, 1>(x + p, rows, 0, acc);
    }
};

// Asks for memory that comes next while other is computed with, line by line: several at once would wait for each
// other. To the second-level cache: it is more than the first holds.
class Ahead {
public:
    explicit MINDLORA_MEMBER Ahead(const void* next) : next_(static_cast<const char*>(next)) {}

    MINDLORA_MEMBER void Ask(int64_t bytes)
    {
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next_ + at, 0, 2);
        next_ += bytes;
    }

private:
    const char* next_;
};

// For each block of 2 kHalf lanes, the sums of the halves of a and then those of b.
template <int kHalf>
MINDLORA_INLINE Vec SumHalves(Vec a, Vec b)
{
    const auto lane = [](int i, int half) {
        const int block = i / (2 * kHalf) * 2 * kHalf, at = i % (2 * kHalf);
        return at < kHalf ? block + at + half : kWidth + block + at - kHalf + half;
    };
    const Lanes first = EachLane([&](int i) { return lane(i, 0); });
    const Lanes second = EachLane([&](int i) { return lane(i, kHalf); });
    return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, second);
}

// Lane i is Sum(v[i]), to the last bit.
template <int kHalf = kWidth / 2>
MINDLORA_INLINE Vec SumEach(Vec (&v)[kWidth])
{
    for (int i = 0; i < kHalf; ++i) v[i] = SumHalves<kHalf>(v[i], v[i + kHalf]);
    if constexpr (kHalf > 1) return SumEach<kHalf / 2>(v);
    return v[0];
}

// y[n - start] = x . W[n] for the rows [start, end).
template <class Rows, class Before>
static void OneToken(
    const Rows& w, const typename Rows::Token* x, int64_t length, int64_t start, int64_t end, Before before, float* y)
{
    // As many chains of sums as hide how long an addition takes.
    constexpr int kJ = 8;
    for (int64_t n = start; n < end; n += kJ) {
        if ((n - start) % kSums == 0) before(n, n + kSums);
        Ahead ahead(w.At(n + kJ));
        Vec acc[1][kJ] = {};
        w.template Add<1, kJ>(x, n, 0, length, acc, [&](int64_t bytes) { ahead.Ask(bytes); });
        for (int j = 0; j < kJ && n + j < end; ++j) y[n + j - start] = Sum(acc[0][j]);
    }
}

// sums[m][j] += the products of M tokens and the rows first + j, kSums of them; each sum is a vector. With `begins`
// they are 0 before, whatever is in them.
template <int M, class Rows>
static __attribute__((noinline)) void AddBlock(const Rows& w, const typename Rows::Token* x, int64_t first,
    int64_t from, int64_t depth, bool begins, Ahead* ahead, float* sums)
{
    constexpr int kJ = std::min(8, kSums / M);
    const auto ask = [&](int64_t bytes) {
        if (ahead != nullptr) ahead->Ask(bytes);
    };
    for (int j = 0; j < kSums; j += kJ) {
        Vec acc[M][kJ];
        for (int m = 0; m < M; ++m) {
            for (int i = 0; i < kJ; ++i) acc[m][i] = begins ? Vec{} : Load(sums + (m * kSums + j + i) * kWidth);
        }
        w.template Add<M, kJ>(x, first + j, from, depth, acc, ask);
        for (int m = 0; m < M; ++m) {
            for (int i = 0; i < kJ; ++i) Store(acc[m][i], sums + (m * kSums + j + i) * kWidth);
        }
    }
}

// Calls f with the constant that equals `tokens`, 1 to kTogether, so that loops over tokens unroll.
template <class F>
MINDLORA_INLINE void WithTokens(int64_t tokens, F f)
{
    switch (tokens) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 3: return f(std::integral_constant<int, 3>());
        case 4: return f(std::integral_constant<int, 4>());
        case 5: return f(std::integral_constant<int, 5>());
        case 6: return f(std::integral_constant<int, 6>());
        case 7: return f(std::integral_constant<int, 7>());
        default: return f(std::integral_constant<int, kTogether>());
    }
}

// y[t, j] = the sum of the vector sums[t][j] for j below count; rows of y lie `stride` apart.
MINDLORA_INLINE void WriteSums(const float* sums, int64_t tokens, int64_t stride, int64_t count, float* y)
{
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t j = 0; j < count; j += kWidth) {
            Vec each[kWidth];
            for (int i = 0; i < kWidth; ++i) {
                each[i] = j + i < count ? Load(sums + (t * kSums + j + i) * kWidth) : Vec{};
            }
            StoreUpTo(SumEach(each), y + t * stride + j, count - j);
        }
    }
}

MINDLORA_INLINE int64_t SumsSize(int64_t tokens) { return std::min(tokens, kChunk) * kSums * kWidth; }

// sums[t][j] += the products of up to kChunk tokens and the rows first + j, as AddBlock. `ahead` is asked once.
template <class Rows>
MINDLORA_INLINE void AddTokens(const Rows& w, const typename Rows::Token* x, int64_t tokens, int64_t first,
    int64_t from, int64_t depth, bool begins, Ahead* ahead, float* sums)
{
    for (int64_t t = 0; t < tokens; t += kTogether) {
        WithTokens(tokens - t, [&](auto constant) {
            AddBlock<decltype(constant)::value>(w, x + t * kDeep<typename Rows::Token>, first, from, depth, begins,
                t == 0 ? ahead : nullptr, sums + t * kSums * kWidth);
        });
    }
}

// y[t, n - start] = x[t] . W[n] for packed tokens and the rows [start, end). `sums` has room for SumsSize(tokens).
// Calls before(n, m) before the product of each block of rows [n, m), which may go past the end.
template <class Rows, class Before>
static void FewTokens(const Rows& w, const typename Rows::Token* x, int64_t tokens, int64_t length, int64_t start,
    int64_t end, Before before, float* sums, float* y)
{
    if constexpr (!Rows::kDecoded) {
        if (tokens == 1) return OneToken(w, x, length, start, end, before, y);
    }
    constexpr int64_t kPart = kDeep<typename Rows::Token>;
    const int64_t columns = end - start;
    for (int64_t n = start; n < end; n += kSums) {
        before(n, n + kSums);
        Ahead ahead(w.At(n + kSums));
        for (int64_t t = 0; t < tokens; t += kChunk) {
            const int64_t chunk = std::min(kChunk, tokens - t);
            int64_t p = 0;
            do {
                const int64_t depth = std::min(kPart, length - p);
                AddTokens(w, x + p * tokens + t * kPart, chunk, n, p, depth, p == 0, t == 0 ? &ahead : nullptr, sums);
                p += kPart;
            } while (p < length);
            WriteSums(sums, chunk, columns, std::min<int64_t>(kSums, end - n), y + t * columns + n - start);
        }
    }
}

// sum[t, n] += bias[n].
template <class T>
MINDLORA_INLINE void AddBias(const T* bias, int64_t tokens, int64_t columns, float* sum)
{
    for (int64_t t = 0; t < tokens; ++t, sum += columns) {
        for (int64_t n = 0; n < columns; n += kWidth) {
            StoreUpTo(LoadUpTo(sum + n, columns - n) + LoadUpTo(bias + n, columns - n), sum + n, columns - n);
        }
    }
}

// The columns of y, whose rows are `out` long, from sums.
template <class T>
MINDLORA_INLINE void WriteColumns(const float* sum, int64_t tokens, int64_t columns, int64_t out, T* y)
{
    for (int64_t t = 0; t < tokens; ++t, sum += columns, y += out) {
        for (int64_t n = 0; n < columns; n += kWidth) {
            StoreUpTo(LoadUpTo(sum + n, columns - n), y + n, columns - n);
        }
    }
}
