#include "terrace/config.h"
