// The algorithm in the namespace of one target. HEADWISE_TARGET names it; its vocabulary is already included.
#include "../headwise.h"
#include "compiler.h"

namespace headwise { namespace HEADWISE_TARGET {
#include "tile.h"
#include "pack.h"
#include "softmax.h"
#include "rules.h"
#include "forward.h"
#include "finish.h"
#include "item.h"
#include "columns.h"
}}  // namespace headwise::HEADWISE_TARGET

#define HEADWISE_JOIN_OF(a, b) a##b
#define HEADWISE_JOIN(a, b) HEADWISE_JOIN_OF(a, b)
#define HEADWISE_TABLE HEADWISE_JOIN(HEADWISE_TARGET, _target)
#define HEADWISE_TEXT_OF(x) #x
#define HEADWISE_TEXT(x) HEADWISE_TEXT_OF(x)

namespace headwise {
extern const Target HEADWISE_TABLE;
const Target HEADWISE_TABLE = {HEADWISE_TEXT(HEADWISE_TARGET), HEADWISE_TARGET::MR, HEADWISE_TARGET::PANEL,
                                      HEADWISE_TARGET::forward_scratch, HEADWISE_TARGET::forward,
                                      HEADWISE_TARGET::column_scratch, HEADWISE_TARGET::columns};
}  // namespace headwise
