// Which pipe may access which bytes when. Every pipe of every core is a thread. Each thread's vector clock says which
// instructions of the others are known to have ended before its next one starts, and a log of the accesses to each
// memory is checked against the clocks. So a missing flag is found although the simulator runs instructions one by one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

// Built-in names of the device compiler.
enum pipe_t { PIPE_S = 0, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };

namespace ascendc_model {

constexpr uint32_t kPipes = 8;
inline constexpr const char* kPipeNames[kPipes] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "ALL", "FIX"};

using Thread = uint32_t;  // core * kPipes + pipe

inline pipe_t PipeOf(Thread thread) { return static_cast<pipe_t>(thread % kPipes); }

class Clocks {
public:
    using Snapshot = std::vector<uint32_t>;

    explicit Clocks(uint32_t cores) : issued_(cores * kPipes, 0), known_(cores * kPipes, Snapshot(cores * kPipes, 0)) {}

    uint32_t Issue(Thread thread) { return ++issued_[thread]; }
    bool Knows(Thread thread, Thread other, uint32_t number) const { return known_[thread][other] >= number; }

    // What has ended once all instructions of the thread so far have ended.
    Snapshot Ended(Thread thread) const
    {
        Snapshot snapshot = known_[thread];
        snapshot[thread] = issued_[thread];
        return snapshot;
    }

    void Learn(Thread thread, const Snapshot& snapshot) { Merge(known_[thread], snapshot); }
    void WaitForItself(Thread thread) { known_[thread][thread] = issued_[thread]; }

    static void Merge(Snapshot& into, const Snapshot& from)
    {
        if (into.empty()) {
            into = from;
        }
        for (size_t i = 0; i < into.size(); ++i) {
            into[i] = std::max(into[i], from[i]);
        }
    }

private:
    std::vector<uint32_t> issued_;
    std::vector<Snapshot> known_;
};

enum class Access : uint8_t { kRead, kWrite, kAtomic };

struct Record {
    uint64_t begin;
    uint64_t end;
    Thread thread;
    uint32_t number;
    Access access;
    const char* api;
};

// The accesses to one memory that still matter, by page.
class AccessLog {
public:
    // Adds an access. Returns false, with the latest conflict, where it and an earlier access share bytes that one of
    // them changes and ordered(earlier) is false. Atomic additions do not conflict with one another.
    template <class Ordered>
    bool Add(const Record& now, const Ordered& ordered, Record& conflict)
    {
        bool fine = true;
        for (uint64_t page = now.begin / kPage; page * kPage < now.end && fine; ++page) {
            Record part = now;
            part.begin = std::max(now.begin, page * kPage);
            part.end = std::min(now.end, (page + 1) * kPage);
            fine = AddToPage(pages_[page], part, ordered, conflict);
        }
        return fine;
    }

private:
    static constexpr uint64_t kPage = 1024;

    template <class Ordered>
    static bool AddToPage(std::vector<Record>& records, const Record& now, const Ordered& ordered, Record& conflict)
    {
        size_t kept = 0;
        bool fine = true;
        for (const Record& old : records) {
            const bool overlap = old.begin < now.end && now.begin < old.end;
            const bool sameInstruction = old.thread == now.thread && old.number == now.number;
            const bool harmless = (old.access == Access::kRead && now.access == Access::kRead) ||
                (old.access == Access::kAtomic && now.access == Access::kAtomic);
            if (overlap && !sameInstruction && !harmless && !ordered(old)) {
                conflict = old;
                fine = false;
            }
            // What follows the new access also follows the accesses that it covers.
            const bool covered = now.begin <= old.begin && old.end <= now.end;
            const bool sameKind = old.thread == now.thread && old.access == now.access;
            if (!(covered && (sameKind || now.access == Access::kWrite))) {
                records[kept++] = old;
            }
        }
        records.resize(kept);
        records.push_back(now);
        return fine;
    }

    std::unordered_map<uint64_t, std::vector<Record>> pages_;
};

}  // namespace ascendc_model
