// Which core has which part of which segment. The segments are laid end to end on a line, each as long as its work, and
// the line is cut into one piece for each core: the only adapter of a batch keeps all cores busy, and each of many
// adapters has few cores, which exchange few partial sums.
#pragma once

#include "ascendc_common/row_products_tiling.h"
#include "ascendc_common/share.h"
#include "multi_lora_delta_segments.h"

namespace mindlora {

// How many cores take part in a round. Each core of a segment writes, adds up and reads as many numbers as the segment
// has, so moving bytes favours few cores; arithmetic favours many. So there are as many as the exchange may cost, and
// more while a core's arithmetic takes longer than moving all bytes. In A and in B, half of a core's last repeat is
// idle on average.
__aicore__ inline uint64_t CoresFor(const Segments& segments, const MultiLoraDeltaTiling& sizes, uint32_t elementBytes)
{
    const uint64_t columns = uint64_t{sizes.in} + sizes.out;
    uint64_t bytes = 0, numbers = 0, work = 0, shared = 0;
    for (uint32_t i = 0; i < segments.Count(); ++i) {
        const Segment s = segments.At(i);
        const uint64_t own = s.Rank() + s.Rows() + s.Numbers();
        bytes += (s.Rank() * columns + s.Rows() * (sizes.in + 2 * uint64_t{sizes.out})) * elementBytes;
        numbers += s.Numbers();
        work += own;
        shared += own * s.Numbers();
    }
    const uint64_t all = static_cast<uint64_t>(AscendC::GetBlockNum());
    if (numbers == 0) {
        return all;
    }
    // Of `cores`, a segment has cores * own / work, and up to one more.
    const uint64_t transfers = bytes / sizes.exchange / kDecodeHops;
    const uint64_t affordable = transfers > numbers ? (transfers - numbers) * work / shared : 0;
    const uint64_t ofACore = kDecodeHops * shared / work;
    uint64_t cores = Least(all, affordable > 1 ? affordable : 1);
    while (cores < all &&
        numbers * (columns + kLanes * cores) * sizes.bytesPerProduct > cores * (bytes + ofACore * cores)) {
        ++cores;
    }
    return cores;
}

class Shares {
public:
    // Deals `length` columns out to at most `cores` cores. `moves`: how often a row itself moves, once for x, twice for
    // y0 and y. Rows without an adapter are work only where they have to be copied.
    __aicore__ inline void Deal(const Segments& segments, uint32_t length, uint32_t moves, bool copies, uint64_t cores)
    {
        length_ = length;
        steps_ = (length + kDecodeStep - 1) / kDecodeStep;
        moves_ = moves;
        copies_ = copies;
        total_ = 0;
        uint64_t widest = 1;
        for (uint32_t i = 0; i < segments.Count(); ++i) {
            const uint64_t work = WorkOf(segments.At(i));
            total_ += work * steps_;
            widest = work > widest ? work : widest;
        }
        // A piece is at least one step of any segment, so that the pieces of a segment have no gaps.
        cores_ = Least(cores, total_ / widest);
        const uint64_t me = static_cast<uint64_t>(AscendC::GetBlockIdx());
        begin_ = me < cores_ ? me * total_ / cores_ : total_;
        end_ = me < cores_ ? (me + 1) * total_ / cores_ : total_;
    }

    __aicore__ inline uint64_t LengthOf(const Segment& segment) const { return WorkOf(segment) * steps_; }

    // This core's columns of a segment that starts at `at` on the line.
    __aicore__ inline Range Mine(const Segment& segment, uint64_t at) const
    {
        const uint64_t work = WorkOf(segment);
        if (work == 0 || end_ <= at || begin_ >= at + work * steps_) {
            return {0, 0};
        }
        const uint64_t from = begin_ <= at ? 0 : (begin_ - at) / work, to = (end_ - at) / work;
        return {Least(from * kDecodeStep, length_), Least(to * kDecodeStep, length_)};
    }

    // How many cores have a piece of the segment, and the first of them.
    __aicore__ inline uint32_t Cores(const Segment& segment, uint64_t at, uint64_t& first) const
    {
        const uint64_t work = WorkOf(segment);
        if (work == 0) {
            return 0;
        }
        first = CoreAt(at + work);
        return static_cast<uint32_t>(CoreAt(at + work * steps_) - first + 1);
    }

private:
    // The cost of a segment for each column: what is moved, and what is multiplied.
    __aicore__ inline uint64_t WorkOf(const Segment& segment) const
    {
        return segment.rank > 0 || copies_ ? segment.Rank() + moves_ * segment.rows + segment.Numbers() : 0;
    }

    // The first core whose piece of the line ends at `place` or after it.
    __aicore__ inline uint64_t CoreAt(uint64_t place) const { return (place * cores_ + total_ - 1) / total_ - 1; }

    uint64_t total_ = 0, cores_ = 0, begin_ = 0, end_ = 0;
    uint32_t length_ = 0, steps_ = 0, moves_ = 0;
    bool copies_ = false;
};

}  // namespace mindlora
