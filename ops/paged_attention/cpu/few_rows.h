// Few rows of a sequence, such as its one token of a decode step: what counts is to read keys and values once, in the
// order in which they lie. Included by paged_attention_kernel.h.

// Tokens in a cache of keys or values; `places` are those of the first head of a task.
template <class T>
struct Tokens {
    const T* from;
    const int64_t* places;
    int64_t count;

    MINDLORA_MEMBER const T* At(int64_t i) const { return from + places[i]; }
};

// Asks for `width` numbers of each of the tokens while others are computed. To the second-level cache: the heads of
// many tokens lie a power of two apart, and few of them would stay in the first.
template <class T>
class Ahead {
public:
    MINDLORA_MEMBER Ahead(const Tokens<T>& tokens, int64_t width) : tokens_(tokens), width_(width) {}

    // All lines of the tokens up to part `i` of `parts`. What is asked for in the order in which it lies, the processor
    // continues by itself: best where there is little to compute meanwhile.
    MINDLORA_MEMBER void AskTo(int64_t i, int64_t parts)
    {
        while (token_ < tokens_.count * i / parts) AskLine();
    }

    // The next line. Several at once would wait for each other, and what is computed meanwhile for them.
    MINDLORA_MEMBER void AskLine()
    {
        if (token_ == tokens_.count) return;
        __builtin_prefetch(tokens_.At(token_) + place_, 0, 2);
        place_ += 64 / sizeof(T);
        if (place_ < width_) return;
        place_ = 0;
        ++token_;
    }

private:
    const Tokens<T> tokens_;
    const int64_t width_;
    int64_t token_ = 0, place_ = 0;
};

// The scores of one head of kWidth keys for H heads and M rows of each.
template <int H, int M, class T>
MINDLORA_INLINE void HeadScores(const float* q, const float* kt, int64_t size, float* scores, Ahead<T>* ahead)
{
    Vec acc[H][M] = {};
    for (int64_t d = 0; d < size; ++d) {
        // As many lines as these keys are.
        for (size_t line = 0; M > 1 && line < kWidth * sizeof(T); line += 64) ahead->AskLine();
        for (int h = 0; h < H; ++h) {
            const Vec key = Load(kt + (h * size + d) * kWidth);
            for (int m = 0; m < M; ++m) acc[h][m] += q[h * M * size + d * M + m] * key;
        }
    }
    for (int h = 0; h < H; ++h) {
        for (int m = 0; m < M; ++m) Store(acc[h][m], scores + (h * M + m) * kKeys);
    }
}

// The scores of up to kWidth keys for all heads and rows.
template <class T>
static void FewScores(
    const Rows& rows, const Tokens<T>& keys, const Tokens<T>& next, const float* q, float* kt, float* scores)
{
    constexpr int kHeads = 4;
    const int64_t size = rows.size;
    Ahead<T> ahead(next, rows.heads * size);
    for (int64_t h = 0, heads; h < rows.heads; h += heads) {
        // One row is one chain of sums for each head: four at once hide how long an addition takes.
        heads = rows.count == 1 && rows.heads - h >= kHeads ? kHeads : 1;
        for (int64_t i = 0; i < heads; ++i) {
            const T* of_head[kWidth];
            for (int64_t j = 0; j < kWidth; ++j) of_head[j] = keys.At(std::min(j, keys.count - 1)) + (h + i) * size;
            if (rows.count == 1) ahead.AskTo(h + i + 1, rows.heads);
            PackKeys(of_head, size, kWidth, kt + i * size * kWidth);
        }
        if (heads == kHeads) {
            HeadScores<kHeads, 1>(q + h * size, kt, size, scores + h * kKeys, &ahead);
            continue;
        }
        for (int64_t r = h * rows.count; r < (h + 1) * rows.count;) {
            WithTileRows((h + 1) * rows.count - r, [&](auto constant) {
                constexpr int M = decltype(constant)::value;
                HeadScores<1, M>(q + r * size, kt, size, scores + r * kKeys, &ahead);
                r += M;
            });
        }
    }
}

// Adds the values of up to kWidth tokens, of which row r sees seen[r], to the sums of all heads and rows.
template <class T>
static void FewValues(const Rows& rows, const Tokens<T>& values, const Tokens<T>& next, const int64_t* seen,
    const float* weights, float* state)
{
    Ahead<T> ahead(next, rows.heads * rows.size);
    for (int64_t h = 0; h < rows.heads; ++h) {
        const T* of_head[kWidth];
        for (int64_t j = 0; j < values.count; ++j) of_head[j] = values.At(j) + h * rows.size;
        if (rows.count == 1) ahead.AskTo(h + 1, rows.heads);
        for (int64_t r = 0; r < rows.count;) {
            WithTileRows(rows.count - r, [&](auto constant) {
                constexpr int M = decltype(constant)::value;
                const int64_t row = h * rows.count + r;
                const auto ask = [&ahead] {
                    if (M > 1) ahead.AskLine();
                };
                AddAllValues<M>(
                    weights + row * kKeys, of_head, rows.size, rows.pitch, seen + r, state + row * rows.pitch, ask);
                r += M;
            });
        }
    }
}

// All rows of a task against the keys [tile, tile + count); `next` comes after them.
template <class T>
static void FewTile(const Rows& rows, const Tokens<T>& keys, const Tokens<T>& values, const Tokens<T>& next,
    int64_t tile, const Workspace& w)
{
    const auto group = [](const Tokens<T>& all, int64_t j, const Tokens<T>& after) {
        return j < all.count ? Tokens<T>{all.from, all.places + j, std::min<int64_t>(kWidth, all.count - j)} : after;
    };
    const Tokens<T> first_values = group(values, 0, next);
    for (int64_t j = 0; j < keys.count; j += kWidth) {
        FewScores(rows, group(keys, j, next), group(keys, j + kWidth, first_values), w.q, w.kt, w.scores + j);
    }
    for (int64_t r = 0; r < rows.heads * rows.count;) {
        WithTileRows(rows.heads * rows.count - r, [&](auto constant) {
            constexpr int M = decltype(constant)::value;
            int64_t seen[M];
            for (int m = 0; m < M; ++m) seen[m] = std::min(rows.Sees((r + m) % rows.count) - tile, keys.count);
            Weigh<M>(w.scores + r * kKeys, seen, rows.pitch, w.state + r * rows.pitch);
            r += M;
        });
    }
    for (int64_t j = 0; j < values.count; j += kWidth) {
        const Tokens<T> here = group(values, j, next);
        int64_t seen[kFewRows];
        for (int64_t r = 0; r < rows.count; ++r) seen[r] = std::min(rows.Sees(r) - tile - j, here.count);
        FewValues(rows, here, group(values, j + kWidth, next), seen, w.scores + j, w.state);
    }
}

// All rows of a task against keys [begin, end).
template <class T>
static void FewRows(const Rows& rows, const T* keys, const T* values, int64_t begin, int64_t end, const int64_t* places,
    const Workspace& w)
{
    for (int64_t tile = begin; tile < end; tile += kKeys) {
        const int64_t count = std::min<int64_t>(kKeys, end - tile), after = end - tile - count;
        const int64_t* at = places + tile - begin;
        const Tokens<T> next{keys, at + count, std::min<int64_t>(kWidth, after)};
        FewTile(rows, Tokens<T>{keys, at, count}, Tokens<T>{values, at, count}, next, tile, w);
    }
}
