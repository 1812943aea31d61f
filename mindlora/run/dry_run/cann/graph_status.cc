// Descriptions of errors, which MindSpore 2.10 registers while its plugin is loaded.
#include <cstdint>
#include <map>
#include <string>

namespace ge {

// MindSpore writes into the map, which is the only field.
struct StatusFactory {
    static StatusFactory* Instance();

    std::map<uint32_t, std::string> descriptions;
};

StatusFactory* StatusFactory::Instance()
{
    static StatusFactory only;
    return &only;
}

}  // namespace ge
