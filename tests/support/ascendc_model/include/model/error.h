// How the simulator refuses a kernel: one exception that says where, what was found and which rule is broken.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ascendc_model {

class ModelError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string Text(const Parts&... parts)
{
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

// "core AIV 3 (block 1, sub-block 1)", or "host" outside a kernel. Defined with the cores.
std::string Where();

template <class... Parts>
[[noreturn]] void Refuse(const std::string& api, const Parts&... parts)
{
    throw ModelError(Text(Where(), ": ", api, ": ", parts...));
}

// Refuses a value outside [low, high].
template <class V, class L, class H>
void CheckRange(const std::string& api, const char* name, V value, L low, H high)
{
    const auto v = static_cast<__int128>(value);
    if (v < static_cast<__int128>(low) || v > static_cast<__int128>(high)) {
        Refuse(api, name, " is ", +value, ", outside [", +low, ", ", +high, "]");
    }
}

}  // namespace ascendc_model
