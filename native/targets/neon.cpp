#include "../vec/neon.h"

#define HEADWISE_TARGET neon
#include "../generic/target.h"
