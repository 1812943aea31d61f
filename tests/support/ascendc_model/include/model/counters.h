// What is counted in a run: functional quantities only, no times.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hazards.h"

namespace ascendc_model {

struct Traffic {
    uint64_t read = 0;
    uint64_t written = 0;
};

struct CoreCounters {
    std::string name;
    std::array<uint64_t, kPipes> instructions{};
    uint64_t repeats = 0;                  // of the vector unit; on a cube core, products of two fractals
    std::map<std::string, Traffic> gm;     // by GM buffer
    std::map<std::string, uint64_t> peak;  // bytes, by on-chip memory
};

struct Report {
    bool ok = false;
    std::string error;
    std::vector<CoreCounters> cores;
    std::map<std::string, Traffic> gm;             // all cores, by GM buffer
    std::map<std::string, uint64_t> instructions;  // all cores, by pipe
    std::map<std::string, uint64_t> peak;          // the most that any core used, by on-chip memory
    std::map<std::string, uint64_t> unwritten;     // bytes that were never written, by GM output
    uint64_t coresThatWorked = 0;                  // cores that issued anything but scalar instructions

    std::string Json() const;
};

namespace json {

inline std::string Quote(const std::string& text)
{
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
        }
        out += c == '\n' ? ' ' : c;
    }
    return out + "\"";
}

inline std::string Value(uint64_t number) { return std::to_string(number); }
inline std::string Value(const Traffic& traffic)
{
    return "{\"read\": " + Value(traffic.read) + ", \"written\": " + Value(traffic.written) + "}";
}

template <class V>
std::string Value(const std::map<std::string, V>& map)
{
    std::string out = "{";
    for (const auto& [key, value] : map) {
        out += (out.size() > 1 ? ", " : "") + Quote(key) + ": " + Value(value);
    }
    return out + "}";
}

inline std::map<std::string, uint64_t> ByName(const std::array<uint64_t, kPipes>& instructions)
{
    std::map<std::string, uint64_t> out;
    for (uint32_t pipe = 0; pipe < kPipes; ++pipe) {
        if (pipe != PIPE_ALL) {
            out[kPipeNames[pipe]] = instructions[pipe];
        }
    }
    return out;
}

}  // namespace json

inline std::string Report::Json() const
{
    std::string list;
    for (const CoreCounters& core : cores) {
        list += (list.empty() ? "" : ", ") + ("{\"name\": " + json::Quote(core.name)) +
            ", \"instructions\": " + json::Value(json::ByName(core.instructions)) +
            ", \"repeats\": " + json::Value(core.repeats) + ", \"gm\": " + json::Value(core.gm) +
            ", \"peak\": " + json::Value(core.peak) + "}";
    }
    return std::string("{\"ok\": ") + (ok ? "true" : "false") + ", \"error\": " + json::Quote(error) +
        ", \"gm\": " + json::Value(gm) + ", \"instructions\": " + json::Value(instructions) +
        ", \"peak\": " + json::Value(peak) + ", \"unwritten\": " + json::Value(unwritten) +
        ", \"cores_that_worked\": " + json::Value(coresThatWorked) + ", \"cores\": [" + list + "]}";
}

}  // namespace ascendc_model
