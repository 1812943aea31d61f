// The kernels of masked_attention. Included by for_each_isa.h, once in the namespace of each instruction set.
//
// A thread takes one head of queries. Scores stand upside down, [key][query], with kLanes queries side by side: sums
// over keys are then sums of vectors, and a product reads them both ways as they lie.
#include "cpu_common/exp.h"

constexpr int kLanes = 2 * kWidth;
// Rows of a product in registers.
constexpr int kTile = 4;

MINDLORA_INLINE int64_t Padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Rows of one head, `stride` floats apart; the copies below are padded with zeros.
struct Head {
    const float* from;
    int64_t stride;
};

// to[i] = row first + i, `size` numbers and zeros up to `width`; zeros from row `count` to `rows`.
static void CopyRows(Head head, int64_t first, int64_t count, int64_t rows, int64_t size, int64_t width, float* to)
{
    std::fill_n(to, rows * width, 0.0f);
    for (int64_t i = 0; i < count; ++i) std::copy_n(head.from + (first + i) * head.stride, size, to + i * width);
}

// columns[d][lane] = factor * rows[lane][d] for kLanes rows.
static void Turn(const float* rows, int64_t size, int64_t width, float factor, float* columns)
{
    for (int64_t d = 0; d < size; ++d) {
        for (int lane = 0; lane < kLanes; ++lane) columns[d * kLanes + lane] = factor * rows[lane * width + d];
    }
}

// acc[i] += sum over p of a[i][p * kColumn] * b[p], for kTile rows and a panel of kLanes columns, `step` apart.
template <int kColumn>
MINDLORA_INLINE void AddTile(
    const float* const (&a)[kTile], const float* b, int64_t step, int64_t depth, Vec (&acc)[kTile][2])
{
    for (int64_t p = 0; p < depth; ++p, b += step) {
        const Vec first = Load(b), second = Load(b + kWidth);
        for (int i = 0; i < kTile; ++i) {
            acc[i][0] += a[i][p * kColumn] * first;
            acc[i][1] += a[i][p * kColumn] * second;
        }
    }
}

// The rows of a tile; past the last row it is that row again.
MINDLORA_INLINE void TileRows(
    const float* from, int64_t first, int64_t count, int64_t stride, const float* (&rows)[kTile])
{
    for (int i = 0; i < kTile; ++i) rows[i] = from + std::min<int64_t>(first + i, count - 1) * stride;
}

// to[key][lane] = keys[key] . columns[lane] for `count` keys.
MINDLORA_INLINE void Products(
    const float* keys, int64_t width, int64_t count, const float* columns, int64_t size, float* to)
{
    for (int64_t key = 0; key < count; key += kTile) {
        const float* rows[kTile];
        TileRows(keys, key, count, width, rows);
        Vec acc[kTile][2] = {};
        AddTile<1>(rows, columns, kLanes, size, acc);
        for (int i = 0; i < kTile && key + i < count; ++i) {
            Store(acc[i][0], to + (key + i) * kLanes);
            Store(acc[i][1], to + (key + i) * kLanes + kWidth);
        }
    }
}

// sums[lane][d] += sum over keys of weights[key][lane] * rows[key][d].
MINDLORA_INLINE void AddOverKeys(const float* weights, const float* rows, int64_t count, int64_t width, float* sums)
{
    for (int lane = 0; lane < kLanes; lane += kTile) {
        const float* of_lanes[kTile];
        for (int i = 0; i < kTile; ++i) of_lanes[i] = weights + lane + i;
        for (int64_t d = 0; d < width; d += kLanes) {
            Vec acc[kTile][2];
            for (int i = 0; i < kTile; ++i) {
                float* const at = sums + (lane + i) * width + d;
                acc[i][0] = Load(at);
                acc[i][1] = Load(at + kWidth);
            }
            AddTile<kLanes>(of_lanes, rows + d, width, count, acc);
            for (int i = 0; i < kTile; ++i) {
                float* const at = sums + (lane + i) * width + d;
                Store(acc[i][0], at);
                Store(acc[i][1], at + kWidth);
            }
        }
    }
}

// The panels of scores of a block of queries: panel p has [key][kLanes] at p * keys * kLanes.
struct Block {
    int64_t panels, keys;
    const char* kinds;  // of each panel, of each kKeyTile keys
    int64_t tiles;

    MINDLORA_MEMBER char Kind(int64_t panel, int64_t tile) const { return kinds[panel * tiles + tile]; }
};

// sums[key][d] += sum over the queries of a block of weights[panel][key][lane] * rows[query][d], for the keys of a
// tile.
MINDLORA_INLINE void AddOverQueries(
    const Block& block, int64_t tile, const float* weights, const float* rows, int64_t width, float* sums)
{
    const int64_t begin = tile * kKeyTile, end = std::min(begin + kKeyTile, block.keys);
    for (int64_t key = begin; key < end; key += kTile) {
        for (int64_t d = 0; d < width; d += kLanes) {
            Vec acc[kTile][2] = {};
            for (int64_t panel = 0; panel < block.panels; ++panel) {
                if (block.Kind(panel, tile) == kHidden) continue;
                const float* of_keys[kTile];
                TileRows(weights + panel * block.keys * kLanes, key, end, kLanes, of_keys);
                AddTile<1>(of_keys, rows + panel * kLanes * width + d, width, kLanes, acc);
            }
            for (int i = 0; i < kTile && key + i < end; ++i) {
                float* const at = sums + (key + i) * width + d;
                Store(Load(at) + acc[i][0], at);
                Store(Load(at + kWidth) + acc[i][1], at + kWidth);
            }
        }
    }
}

// s[key][lane] += mask[query of lane][key] for the keys of a tile.
static void AddMask(const float* mask, int64_t stride, int64_t queries, int64_t begin, int64_t end, float* s)
{
    for (int64_t lane = 0; lane < queries; ++lane) {
        for (int64_t key = begin; key < end; ++key) s[key * kLanes + lane] += mask[lane * stride + key];
    }
}

// Calls f with the first and the end of each stretch of keys of one kind that a panel sees.
template <class F>
MINDLORA_INLINE void EachSeen(const Block& block, int64_t panel, F f)
{
    for (int64_t tile = 0, next; tile < block.tiles; tile = next) {
        const char kind = block.Kind(panel, tile);
        for (next = tile + 1; next < block.tiles && block.Kind(panel, next) == kind;) ++next;
        if (kind != kHidden) f(tile * kKeyTile, std::min(next * kKeyTile, block.keys), kind);
    }
}

// The weights of a panel: softmax over the keys of columns . keys + mask, for `queries` queries.
MINDLORA_INLINE void Weights(const Block& block, int64_t panel, const float* keys, int64_t width, const float* columns,
    int64_t size, const float* mask, int64_t queries, float* s)
{
    Vec most[2] = {Splat(-INFINITY), Splat(-INFINITY)}, total[2] = {};
    EachSeen(block, panel, [&](int64_t begin, int64_t end, char kind) {
        Products(keys + begin * width, width, end - begin, columns, size, s + begin * kLanes);
        if (kind == kPartly) AddMask(mask, block.keys, queries, begin, end, s);
        for (int64_t at = begin * kLanes; at < end * kLanes; at += kLanes) {
            for (int v = 0; v < 2; ++v) most[v] = Larger(most[v], Load(s + at + v * kWidth));
        }
    });
    EachSeen(block, panel, [&](int64_t begin, int64_t end, char) {
        for (int64_t at = begin * kLanes; at < end * kLanes; at += kLanes) {
            for (int v = 0; v < 2; ++v) {
                const Vec weight = Exp(Load(s + at + v * kWidth) - most[v]);
                Store(weight, s + at + v * kWidth);
                total[v] += weight;
            }
        }
    });
    const Vec factor[2] = {1.0f / total[0], 1.0f / total[1]};
    EachSeen(block, panel, [&](int64_t begin, int64_t end, char) {
        for (int64_t at = begin * kLanes; at < end * kLanes; at += kLanes) {
            for (int v = 0; v < 2; ++v) Store(Load(s + at + v * kWidth) * factor[v], s + at + v * kWidth);
        }
    });
}

// From weights P and their gradients G, in place of G: P * (G - the sum over keys of P * G) * scale.
MINDLORA_INLINE void ScoreGrads(const Block& block, int64_t panel, float scale, const float* weights, float* grads)
{
    Vec sum[2] = {};
    EachSeen(block, panel, [&](int64_t begin, int64_t end, char) {
        for (int64_t at = begin * kLanes; at < end * kLanes; at += kLanes) {
            for (int v = 0; v < 2; ++v) sum[v] += Load(weights + at + v * kWidth) * Load(grads + at + v * kWidth);
        }
    });
    EachSeen(block, panel, [&](int64_t begin, int64_t end, char) {
        for (int64_t at = begin * kLanes; at < end * kLanes; at += kLanes) {
            for (int v = 0; v < 2; ++v) {
                const int64_t i = at + v * kWidth;
                Store(Load(weights + i) * (Load(grads + i) - sum[v]) * scale, grads + i);
            }
        }
    });
}

// What each of the tiles of keys is to a panel of queries, of which the mask has `queries` rows.
static void FindKinds(const float* mask, int64_t keys, int64_t queries, char* kinds)
{
    bool all_see = true;
    for (int64_t tile = 0; tile * kKeyTile < keys; ++tile) kinds[tile] = kHidden;
    for (int64_t query = 0; query < queries; ++query) {
        all_see = all_see && std::any_of(mask + query * keys, mask + (query + 1) * keys, Shows);
    }
    for (int64_t tile = 0; tile * kKeyTile < keys; ++tile) {
        const int64_t begin = tile * kKeyTile, end = std::min(begin + kKeyTile, keys);
        bool some = false, whole = true;
        for (int64_t query = 0; query < queries; ++query) {
            for (int64_t key = begin; key < end; ++key) {
                some = some || Shows(mask[query * keys + key]);
                whole = whole && mask[query * keys + key] == 0;
            }
        }
        // A query that sees nothing has the weights of its scores, as plain operators give it.
        kinds[tile] = whole ? kWhole : some || !all_see ? kPartly : kHidden;
    }
}

// The tiles of all panels of all rows of a batch, [row][panel][tile].
static std::vector<char> AllKinds(const AttentionSizes& a, const float* mask, int threads)
{
    const int64_t panels = (a.tokens + kLanes - 1) / kLanes, tiles = (a.tokens + kKeyTile - 1) / kKeyTile;
    std::vector<char> kinds(a.rows * panels * tiles);
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < a.rows * panels; ++i) {
        const int64_t row = i / panels, query = i % panels * kLanes;
        FindKinds(mask + (row * a.tokens + query) * a.tokens, a.tokens, std::min<int64_t>(kLanes, a.tokens - query),
            kinds.data() + i * tiles);
    }
    return kinds;
}

// The memory of a thread, cut into parts that begin at a cache line.
class Memory {
public:
    explicit Memory(int64_t count)
    {
        static thread_local std::vector<float> buffer;
        next_ = reinterpret_cast<float*>(Padded(reinterpret_cast<intptr_t>(Scratch(&buffer, count + 16)), 64));
    }

    float* Take(int64_t count)
    {
        float* const taken = next_;
        next_ += Padded(count, 16);
        return taken;
    }

private:
    float* next_;
};

// One head of one row of a batch.
static void AttendHead(const AttentionSizes& a, const char* kinds, const Head& query, const Head& key,
    const Head& value, const float* mask, float scale, float* y)
{
    const int64_t tokens = a.tokens, width = Padded(a.size, kLanes), tiles = (tokens + kKeyTile - 1) / kKeyTile;
    Memory memory(2 * tokens * width + (tokens + 2 * width + a.size) * kLanes + 96);
    float *const keys = memory.Take(tokens * width), *const values = memory.Take(tokens * width);
    float *const rows = memory.Take(kLanes * width), *const columns = memory.Take(kLanes * a.size);
    float *const s = memory.Take(tokens * kLanes), *const sums = memory.Take(kLanes * width);
    CopyRows(key, 0, tokens, tokens, a.size, width, keys);
    CopyRows(value, 0, tokens, tokens, a.size, width, values);
    for (int64_t first = 0; first < tokens; first += kLanes) {
        const int64_t queries = std::min<int64_t>(kLanes, tokens - first);
        const Block block{1, tokens, kinds + first / kLanes * tiles, tiles};
        CopyRows(query, first, queries, kLanes, a.size, width, rows);
        Turn(rows, a.size, width, scale, columns);
        Weights(block, 0, keys, width, columns, a.size, mask + first * tokens, queries, s);
        std::fill_n(sums, kLanes * width, 0.0f);
        EachSeen(block, 0, [&](int64_t begin, int64_t end, char) {
            AddOverKeys(s + begin * kLanes, values + begin * width, end - begin, width, sums);
        });
        for (int64_t i = 0; i < queries; ++i) std::copy_n(sums + i * width, a.size, y + (first + i) * query.stride);
    }
}

static void MaskedAttention(const AttentionSizes& a, const float* query, const float* key, const float* value,
    const float* mask, float scale, int threads, float* y)
{
    const std::vector<char> kinds = AllKinds(a, mask, threads);
    const int64_t of_row = kinds.size() / std::max<int64_t>(1, a.rows);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < a.rows * a.heads; ++i) {
        const int64_t row = i / a.heads, head = i % a.heads;
        const int64_t at = a.Query(row, head), of_key = a.Key(row, head / a.Group());
        AttendHead(a, kinds.data() + row * of_row, {query + at, a.heads * a.size}, {key + of_key, a.key_heads * a.size},
            {value + of_key, a.key_heads * a.size}, mask + row * a.tokens * a.tokens, scale, y + at);
    }
}

#include "masked_attention/cpu/masked_attention_grad_kernel.h"
