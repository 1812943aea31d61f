// The kernel of routed_experts. Included once in the namespace of each instruction set, after ExpertProduct for the
// weights, W: out[t][n - start] = token[t] . (output n of the expert), for outputs start to end.

// low = scale * A x, if the token has an adapter.
static void ShrinkOne(const ExpertPairs& pairs, const Pair& pair, const float* x, int64_t in, float* low)
{
    if (pair.slot < 0) return;
    Shrink<1>(&x, pairs.Rows(pair), pairs.width, in, pairs.Rank(pair), pairs.scales[pair.slot], low);
}

// sum[n] += low . B[n] for `count` outputs from `start` on of a weight with `in` inputs.
static void ExpandOne(
    const ExpertPairs& pairs, const Pair& pair, const float* low, int64_t in, int64_t start, int64_t count, float* sum)
{
    if (pair.slot < 0) return;
    AddExpand(low, pairs.Rows(pair) + in + start, pairs.width, pairs.Rank(pair), count, sum);
}

// `work` holds tokens and their experts, those of one expert together.
template <class W>
static void RoutedExperts(const float* x, const float* weights, const W& gate_up, const W& down,
    const ExpertPairs& gate_up_pairs, const ExpertPairs& down_pairs, const std::vector<Pair>& work, int64_t tokens,
    int64_t each, int64_t hidden, int64_t inner, int threads, float* y)
{
    static thread_local std::vector<float> inner_buffer, output_buffer, low_buffer, down_low_buffer;
    const int64_t count = static_cast<int64_t>(work.size());
    float* inside = Scratch(&inner_buffer, count * inner);
    float* outputs = Scratch(&output_buffer, count * hidden);
    float* low = Scratch(&low_buffer, count * gate_up_pairs.max_rank);
    float* down_low = Scratch(&down_low_buffer, count * down_pairs.max_rank);
    std::vector<std::pair<int64_t, int64_t>> groups;
    for (int64_t start = 0, end; start < count; start = end) {
        end = start + 1;
        while (end < count && work[end].expert == work[start].expert) ++end;
        groups.emplace_back(start, end - start);
    }
    constexpr int64_t kRange = W::kRange;
    const int64_t inner_ranges = (inner + kRange - 1) / kRange, output_ranges = (hidden + kRange - 1) / kRange;
    const int64_t group_count = static_cast<int64_t>(groups.size());
#pragma omp parallel num_threads(threads)
    {
        std::vector<const float*> token;
        std::vector<float*> gate, out;
        std::vector<float> gates;
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < count; ++p) {
            ShrinkOne(gate_up_pairs, work[p], x + work[p].at / each * hidden, hidden, low + p * gate_up_pairs.max_rank);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < group_count * inner_ranges; ++task) {
            const auto [first, size] = groups[task / inner_ranges];
            const int64_t start = task % inner_ranges * kRange, end = std::min(inner, start + kRange);
            const int64_t expert = work[first].expert;
            token.resize(size), gate.resize(size), out.resize(size), gates.resize(size * kRange);
            for (int64_t i = 0; i < size; ++i) {
                token[i] = x + work[first + i].at / each * hidden;
                gate[i] = gates.data() + i * kRange;
                out[i] = inside + work[first + i].at * inner + start;
            }
            ExpertProduct(gate_up, expert, token.data(), size, start, end, gate.data());
            ExpertProduct(gate_up, expert, token.data(), size, inner + start, inner + end, out.data());
            for (int64_t i = 0; i < size; ++i) {
                const Pair& pair = work[first + i];
                const float* shrunk = low + (first + i) * gate_up_pairs.max_rank;
                ExpandOne(gate_up_pairs, pair, shrunk, hidden, start, end - start, gate[i]);
                ExpandOne(gate_up_pairs, pair, shrunk, hidden, inner + start, end - start, out[i]);
                for (int64_t n = 0; n < end - start; ++n) out[i][n] *= gate[i][n] / (1.0f + std::exp(-gate[i][n]));
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < count; ++p) {
            ShrinkOne(down_pairs, work[p], inside + work[p].at * inner, inner, down_low + p * down_pairs.max_rank);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < group_count * output_ranges; ++task) {
            const auto [first, size] = groups[task / output_ranges];
            const int64_t start = task % output_ranges * kRange, end = std::min(hidden, start + kRange);
            token.resize(size), out.resize(size);
            for (int64_t i = 0; i < size; ++i) {
                token[i] = inside + work[first + i].at * inner;
                out[i] = outputs + work[first + i].at * hidden + start;
            }
            ExpertProduct(down, work[first].expert, token.data(), size, start, end, out.data());
            for (int64_t i = 0; i < size; ++i) {
                ExpandOne(down_pairs, work[first + i], down_low + (first + i) * down_pairs.max_rank, inner, start,
                    end - start, out[i]);
            }
        }
#pragma omp for
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t n = 0; n < hidden; ++n) {
                float sum = 0.0f;
                for (int64_t j = t * each; j < (t + 1) * each; ++j) sum += weights[j] * outputs[j * hidden + n];
                y[t * hidden + n] = sum;
            }
        }
    }
}
