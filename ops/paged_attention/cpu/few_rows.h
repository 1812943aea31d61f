// Few rows of a sequence, such as its one token of a decode step: what counts is to read keys and values once, in the
// order in which they lie. Included by paged_attention_kernel.h.

// Tokens in a cache of keys or values; `places` are those of the first head of a task.
template <class T>
struct Tokens {
    const T* from;
    const int64_t* places;
    int64_t count;

    MINDLORA_MEMBER const T* At(int64_t i) const { return from + places[i]; }

    // Asks for part `i` of `parts` of the tokens, `width` numbers of each. To the second-level cache: the heads of many
    // tokens lie a power of two apart, and few of them would stay in the first. What is asked for in the order in which
    // it lies, the processor continues by itself.
    MINDLORA_MEMBER void Prefetch(int64_t i, int64_t parts, int64_t width) const
    {
        for (int64_t j = count * i / parts; j < count * (i + 1) / parts; ++j) {
            for (int64_t d = 0; d < width; d += 64 / sizeof(T)) __builtin_prefetch(At(j) + d, 0, 2);
        }
    }
};

// The scores of one head of kWidth keys for H heads and M rows of each.
template <int H, int M>
MINDLORA_INLINE void HeadScores(const float* q, const float* kt, int64_t size, float* scores)
{
    Vec acc[H][M] = {};
    for (int64_t d = 0; d < size; ++d) {
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
    for (int64_t h = 0, heads; h < rows.heads; h += heads) {
        // One row is one chain of sums for each head: four at once hide how long an addition takes.
        heads = rows.count == 1 && rows.heads - h >= kHeads ? kHeads : 1;
        for (int64_t i = 0; i < heads; ++i) {
            const T* of_head[kWidth];
            for (int64_t j = 0; j < kWidth; ++j) of_head[j] = keys.At(std::min(j, keys.count - 1)) + (h + i) * size;
            next.Prefetch(h + i, rows.heads, rows.heads * size);
            PackKeys(of_head, size, kWidth, kt + i * size * kWidth);
        }
        if (heads == kHeads) {
            HeadScores<kHeads, 1>(q + h * size, kt, size, scores + h * kKeys);
            continue;
        }
        for (int64_t r = h * rows.count; r < (h + 1) * rows.count;) {
            WithTileRows((h + 1) * rows.count - r, [&](auto constant) {
                constexpr int M = decltype(constant)::value;
                HeadScores<1, M>(q + r * size, kt, size, scores + r * kKeys);
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
    for (int64_t h = 0; h < rows.heads; ++h) {
        const T* of_head[kWidth];
        for (int64_t j = 0; j < values.count; ++j) of_head[j] = values.At(j) + h * rows.size;
        next.Prefetch(h, rows.heads, rows.heads * rows.size);
        for (int64_t r = 0; r < rows.count;) {
            WithTileRows(rows.count - r, [&](auto constant) {
                constexpr int M = decltype(constant)::value;
                const int64_t row = h * rows.count + r;
                AddAllValues<M>(
                    weights + row * kKeys, of_head, rows.size, rows.pitch, seen + r, state + row * rows.pitch);
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
